"""Problems, and what /livez and /readyz answer."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.service.schemas.values import Dfid, ReasonCode


class ProblemSchema(TypedDict):
    """An error, as RFC 9457 has it."""

    type: Annotated[
        str, Field(description="Where the code is explained.", json_schema_extra={"format": "uri-reference"})
    ]
    title: str
    status: int
    detail: str
    reason_code: ReasonCode
    retryable: Annotated[bool, Field(description="The same request, unchanged, may succeed later.")]
    hint: Annotated[str, Field(description="What to do.")]
    dfid: NotRequired[Dfid]
    instance: NotRequired[Annotated[str, Field(description="The service's log has a line with the same `instance`.")]]


Check = str | dict[str, str]
Checks = Annotated[
    dict[str, Check], Field(description="`ok` or the reason code of what is wrong, by check or by check and gate.")
]


class NotReady(ProblemSchema):
    """The problem that /readyz answers while the process should get no requests."""

    checks: Checks


class Ready(TypedDict):
    """The process should get requests."""

    status: Literal["ready"]
    checks: Checks


class Live(TypedDict):
    """The process lives."""

    status: Literal["live"]

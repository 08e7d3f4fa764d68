"""Contract sections that say how a decision is reached within the envelope: `readings`, `policy`, `max_error`. Pure.

A reading is what a text or a row of fields says, found by a reader outside the kernel, with probabilities. The policy is
the written rule that makes a decision of readings and fields. None of them permits anything: authority names no reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sds.kernel.contract.form import Section
from sds.kernel.contract.types import Code, Expression, FieldPath, Name
from sds.kernel.envelope.envelope import ESCALATE

READINGS_MAX = 8
COMBINATIONS_MAX = 1024
ROOT = "reading"  # in expressions a reading is `reading.NAME`

_DECIMAL = re.compile(r"[01](\.[0-9]{1,6})?")

Meaning = Annotated[str, Field(min_length=1, max_length=200)]
Otherwise = Literal["ESCALATE", "MODEL"]


def _share(value: object) -> object:
    """Return a Decimal for `0`, `1` and the text that a record holds; leave any other value to pydantic."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return Decimal(value) if whole or (isinstance(value, str) and _DECIMAL.fullmatch(value)) else value  # type: ignore[arg-type]


# Between 0 and 1. A contract's hash covers its text as it was written: `0.02`.
Share = Annotated[Decimal, BeforeValidator(_share), Field(ge=0, le=1, decimal_places=6)]


class ReadingSpec(Section):
    """One question. It has exactly one of: `values`, an enumeration read from the evidence, each with a line of meaning; or
    `score`, a number in [0, 1] over snapshot fields, where `reading.NAME` stands for the probabilities of an enumeration.
    """

    question: str = Field(min_length=1, max_length=400)
    values: dict[Name, Meaning] = Field(default_factory=dict, max_length=32)
    score: tuple[FieldPath, ...] = Field(default=(), max_length=64)

    @model_validator(mode="after")
    def _one_of_two(self) -> ReadingSpec:
        if bool(self.values) == bool(self.score):
            raise ValueError("must have either `values`, for an enumeration, or `score`, for a number")
        if self.values and len(self.values) < 2:
            raise ValueError("`values` must have two or more entries")
        return self


class PolicyLine(Section):
    """Propose a kind with this reason, or ESCALATE, when `when` holds. The last line says what is done `otherwise`."""

    kind: Code | None = None
    reason: Code | None = None
    when: Expression = "true"
    params: dict[Name, Expression] = Field(default_factory=dict, max_length=8)
    otherwise: Otherwise | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PolicyLine:
        if self.otherwise is not None:
            if self.kind or self.reason or self.params or self.when != "true":
                raise ValueError("`otherwise` must be the only field of its line")
        elif self.kind == ESCALATE:
            if self.reason or self.params:
                raise ValueError("ESCALATE takes neither a reason nor parameters")
        elif self.kind is None or self.reason is None:
            raise ValueError("must have `kind` and `reason`, or `otherwise`")
        return self


class MaxError(Section):
    """How often a decision without a human may be wrong, with probability 1 - `delta` over the labels (docs/contract.md).

    `kinds` overrides `any` for decisions of one kind; a kind that neither names is not bounded.
    """

    any: Share | None = None
    kinds: dict[Code, Share] = Field(default_factory=dict, max_length=16)
    delta: Share = Decimal("0.05")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """Take one number for all kinds, and numbers for kinds beside it: `{any: 0.02, COMPENSATE: 0.01}`."""
        if not isinstance(data, Mapping):
            return {"any": data}
        named = {key: value for key, value in data.items() if key.isupper()}
        if not named:
            return data
        rest = {key: value for key, value in data.items() if key not in named}
        return {**rest, "kinds": {**rest.get("kinds", {}), **named}}

    def of(self, kind: str) -> Decimal | None:
        return self.kinds.get(kind, self.any)

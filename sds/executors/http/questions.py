"""The questions of a gateway file: an order, its look-up, its voiding and its reversal; and which answer means what.

A reversal has a key of its own, which is made from the order's.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sds.executors.http.bodies import BodyForm, unwritable_in_form
from sds.executors.http.templates import (
    KEY_FACTS,
    LOOKUP_FACTS,
    ORDER_FACTS,
    REVERSAL_FACTS,
    misplaced_number,
    texts_in,
    unknown_place,
)
from sds.kernel.contract.types import ContradictionError

# Statuses that say nothing certain of an order: who is asking, in the middle of it, try again.
_UNCERTAIN = frozenset({401, 403, 407, 408, 409, 425, 429})
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_FIELD = re.compile(r"[A-Za-z0-9_$@-]{1,64}(\.[A-Za-z0-9_$@-]{1,64}){0,7}")
OUTCOMES = ("settled", "rejected", "pending", "absent")
WHOLE = "."  # names an answer that is itself a list
_OURS = frozenset({"content-length", "content-type", "transfer-encoding", "host", "connection", "accept-encoding"})


def _header_name(text: str) -> str:
    if not _HEADER.fullmatch(text) or text.lower() in _OURS:
        raise ValueError("must be the name of a header that HTTP itself does not set")
    return text


def _field_path(text: str) -> str:
    if not _FIELD.fullmatch(text):
        raise ValueError("must be the name of a field, or names with dots between, such as `payment.id`")
    return text


def _list_path(text: str) -> str:
    return text if text == WHOLE else _field_path(text)


def _certain(status: int) -> int:
    if not (200 <= status < 300 or 400 <= status < 500) or status in _UNCERTAIN:
        raise ValueError(f"must not be {status}: an answer with this status is not certain, so the order stays unknown")
    return status


def is_path(text: str) -> bool:
    return text.startswith("/") and text.isascii() and text.isprintable() and not {" ", "#"} & set(text)


def _path(text: str) -> str:
    if not is_path(text):
        raise ValueError("must be a path that begins with `/`, in printable ASCII")
    return text


HeaderName = Annotated[str, AfterValidator(_header_name)]
FieldName = Annotated[str, AfterValidator(_field_path)]
ListName = Annotated[str, AfterValidator(_list_path)]
Status = Annotated[int, AfterValidator(_certain)]
Prefix = Annotated[str, Field(max_length=64)]
PathTemplate = Annotated[str, Field(max_length=1024), AfterValidator(_path)]


class FormPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rule(FormPart):
    """One kind of answer: one of these statuses, and these values in these fields. A text may name facts of the order."""

    status: Annotated[list[Status], Field(min_length=1, max_length=16)]
    where: dict[FieldName, str | int | bool] = Field(default_factory=dict, max_length=16)


Rules = Annotated[list[Rule], Field(max_length=16)]


class ReplyForm(FormPart):
    """Where an answer names our key: in a field, or in a header. An answer that does not name it is not believed."""

    key: FieldName | None = None
    key_header: HeaderName | None = None
    reference: FieldName | None = None

    @model_validator(mode="after")
    def _one(self) -> ReplyForm:
        if (self.key is None) == (self.key_header is None):
            raise ValueError("must have either `key` or `key_header`: where an answer names the order's key")
        return self


class GatewayQuestion(FormPart):
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    path: PathTemplate
    headers: dict[HeaderName, str] = Field(default_factory=dict, max_length=16)
    body: BodyForm = "json"
    fields: dict[str, Any] = Field(default_factory=dict)
    key_header: HeaderName | None = None
    reply: ReplyForm | None = None
    settled: Rules = Field(default_factory=list)
    rejected: Rules = Field(default_factory=list)
    pending: Rules = Field(default_factory=list)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the request."""
        return (self.path, *self.headers.values(), *texts_in(self.fields))

    @property
    def compared(self) -> tuple[str, ...]:
        """The texts with which an answer is compared."""
        rules = (getattr(self, outcome, ()) for outcome in OUTCOMES)
        return tuple(text for each in rules for rule in each for text in texts_in(rule.where))

    @model_validator(mode="after")
    def _writable(self) -> GatewayQuestion:
        if self.body == "form" and not self.fields:
            raise ContradictionError(("body",), "needs `fields`, of which a form consists")
        if self.body == "form" and (fault := unwritable_in_form(self.fields)):
            raise ContradictionError(("fields",), fault)
        return self

    def refuse_unknown(self, known: frozenset[str], *, params: bool) -> None:
        """Raise ContradictionError for a placeholder that no fact of this question fills."""
        parts: list[tuple[str, object]] = [("path", self.path), ("headers", self.headers), ("fields", self.fields)]
        parts += [(outcome, [rule.where for rule in getattr(self, outcome, ())]) for outcome in OUTCOMES]
        for name, part in parts:
            for text in texts_in(part):
                if place := unknown_place(text, known, params=params):
                    facts = ", ".join([*sorted(known), *(["params.NAME"] if params else [])])
                    raise ContradictionError((name,), f"`{place}` is not a placeholder; placeholders are: {facts}")
                if place := misplaced_number(text, field=name not in ("path", "headers")):
                    message = (
                        f"`{place}` is a number, which must be a field's whole value; a text has `:2` without the `n`"
                    )
                    raise ContradictionError((name,), message)

    def refuse_unsent(self, what: str, done: str) -> None:
        """Raise ContradictionError where the key is not sent, or no answer means that it was `done`."""
        if self.key_header is None and not any("{key}" in text for text in self.texts):
            raise ContradictionError((), f"must send {what}'s key: give `key_header`, or `{{key}}` in a field")
        if not self.settled and not self.pending:
            raise ContradictionError(
                (), f"needs `settled` or `pending`: the answers that mean that {done}, or accepted"
            )


class OrderForm(GatewayQuestion):
    @model_validator(mode="after")
    def _facts(self) -> OrderForm:
        self.refuse_unknown(ORDER_FACTS, params=True)
        self.refuse_unsent("the order", "the order was carried out")
        return self


class VoidForm(GatewayQuestion):
    @model_validator(mode="after")
    def _facts(self) -> VoidForm:
        self.refuse_unknown(KEY_FACTS, params=False)
        if not self.rejected:
            raise ContradictionError((), "needs `rejected`: the answers that mean that the key is void")
        return self


class LookupForm(GatewayQuestion):
    """`entries`: the field of the list that has our order as an entry, or `.`. Then key, reference and rules are about that
    entry, and `absent` is about an answer whose list does not have it.
    """

    known: ClassVar[frozenset[str]] = LOOKUP_FACTS
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    absent: Rules = Field(default_factory=list)
    absent_without_key: bool = False
    entries: ListName | None = None

    @model_validator(mode="after")
    def _facts(self) -> LookupForm:
        self.refuse_unknown(self.known, params=True)
        if not self.settled:
            raise ContradictionError((), "needs `settled`: the answers that mean that it was carried out")
        return self


class ReversalLookupForm(LookupForm):
    known: ClassVar[frozenset[str]] = REVERSAL_FACTS


class ReverseForm(GatewayQuestion):
    """Takes back what an order did. `settled`: it is undone; `rejected`: it never will be."""

    lookup: ReversalLookupForm

    @model_validator(mode="after")
    def _facts(self) -> ReverseForm:
        self.refuse_unknown(REVERSAL_FACTS, params=True)
        self.refuse_unsent("the reversal", "it is undone")
        return self

"""The form of a gateway file: what is sent where, and what each answer means. docs/library.md describes every field.

Nothing here uses the network: a file is checked before the first order. Secrets are named, never given.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sds.executors.http.bodies import BodyForm, unwritable_in_form
from sds.executors.http.templates import (
    KEY_FACTS,
    LOOKUP_FACTS,
    ORDER_FACTS,
    PERIOD_FACTS,
    KeyForm,
    misplaced_number,
    texts_in,
    unknown_place,
    without_after,
)
from sds.host.machine import is_loopback
from sds.kernel.contract.types import ContradictionError

# Statuses that say nothing certain of an order: who is asking, in the middle of it, try again.
_UNCERTAIN = frozenset({401, 403, 407, 408, 409, 425, 429})
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_FIELD = re.compile(r"[A-Za-z0-9_$@-]{1,64}(\.[A-Za-z0-9_$@-]{1,64}){0,7}")
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


def _address(text: str) -> str:
    try:
        url = urlsplit(text)
        host, _ = url.hostname or "", url.port
    except ValueError:
        raise ValueError("must be a URL") from None
    if url.username is not None or url.password is not None or url.query or url.fragment or not text.isprintable():
        raise ValueError("must be a URL without a user name, a password, a query or a fragment")
    if not host or not (url.scheme == "https" or (url.scheme == "http" and is_loopback(host))):
        raise ValueError("must begin with https://; http:// is only for this machine")
    return text.rstrip("/")


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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SecretPlace(_Part):
    """Where a secret is: in an environment variable or in a file. A relative file lies beside the gateway file."""

    env: str = ""
    file: str = ""

    @model_validator(mode="after")
    def _one(self) -> SecretPlace:
        if bool(self.env) == bool(self.file):
            raise ValueError("must have either `env` or `file`")
        return self


class ClientCredentials(_Part):
    """Where a token is fetched, and with what (OAuth 2.0, client credentials). `token_url` may be at another address."""

    token_url: Annotated[str, Field(max_length=1024), AfterValidator(_address)]
    client_id: SecretPlace
    client_secret: SecretPlace
    credentials_in: Literal["header", "body"] = "header"
    scope: Annotated[str, Field(max_length=1024)] = ""

    @property
    def token_address(self) -> str:
        return "{0.scheme}://{0.netloc}".format(urlsplit(self.token_url))

    @property
    def token_path(self) -> str:
        return urlsplit(self.token_url).path or "/"


class Authentication(_Part):
    """What shows who is asking, in a header: a secret, or a token that is fetched."""

    header: HeaderName = "Authorization"
    prefix: Prefix = "Bearer "
    secret: SecretPlace | None = None
    oauth2: ClientCredentials | None = None

    @model_validator(mode="after")
    def _one(self) -> Authentication:
        if (self.secret is None) == (self.oauth2 is None):
            raise ValueError("must have either `secret` or `oauth2`")
        return self


class SignatureForm(_Part):
    """The header that carries the HMAC-SHA256 of each request's body."""

    header: HeaderName
    prefix: Prefix = ""
    secret: SecretPlace
    encoding: Literal["hex", "base64"] = "hex"


class Tls(_Part):
    """PEM files; relative ones lie beside the gateway file. `ca`: trusted instead of the system's; `certificate`: our own."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Tls:
        if self.key and not self.certificate:
            raise ContradictionError(("key",), "needs `certificate`, too")
        return self


class Rule(_Part):
    """One kind of answer: one of these statuses, and these values in these fields. A text may name facts of the order."""

    status: Annotated[list[Status], Field(min_length=1, max_length=16)]
    where: dict[FieldName, str | int | bool] = Field(default_factory=dict, max_length=16)


Rules = Annotated[list[Rule], Field(max_length=16)]


class ReplyForm(_Part):
    """Where an answer names our key: in a field, or in a header. An answer that does not name it is not believed."""

    key: FieldName | None = None
    key_header: HeaderName | None = None
    reference: FieldName | None = None

    @model_validator(mode="after")
    def _one(self) -> ReplyForm:
        if (self.key is None) == (self.key_header is None):
            raise ValueError("must have either `key` or `key_header`: where an answer names the order's key")
        return self


class GatewayQuestion(_Part):
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
        rules = (getattr(self, outcome, ()) for outcome in ("settled", "rejected", "pending", "absent"))
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
        outcomes = ("settled", "rejected", "pending", "absent")
        parts += [(outcome, [rule.where for rule in getattr(self, outcome, ())]) for outcome in outcomes]
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


class OrderForm(GatewayQuestion):
    @model_validator(mode="after")
    def _facts(self) -> OrderForm:
        self.refuse_unknown(ORDER_FACTS, params=True)
        if self.key_header is None and not any("{key}" in text for text in self.texts):
            raise ContradictionError((), "must send the order's key: give `key_header`, or `{key}` in a field")
        if not self.settled and not self.pending:
            raise ContradictionError(
                (), "needs `settled` or `pending`: the answers that mean that the order was carried out, or accepted"
            )
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

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    absent: Rules = Field(default_factory=list)
    absent_without_key: bool = False
    entries: ListName | None = None

    @model_validator(mode="after")
    def _facts(self) -> LookupForm:
        self.refuse_unknown(LOOKUP_FACTS, params=True)
        if not self.settled:
            raise ContradictionError((), "needs `settled`: the answers that mean that the order was carried out")
        return self


class TimeField(_Part):
    field: FieldName
    unit: Literal["ms", "s", "iso"] = "ms"


class LineForm(_Part):
    """Where the parts of a statement's line are. `outcomes`: the gateway's words for settled, rejected, reverted, pending.

    `decimals`: its amounts are texts with so many, or with `amounts: number` JSON numbers with so many at most; 0: they are
    whole numbers in minor units. `skip_without_key`: a line that has no key is somebody else's. `where`: so is one without
    these values. `currency`: the field of a line's currency, which is compared with the file's.
    """

    key: FieldName
    skip_without_key: bool = False
    where: dict[FieldName, str | int | bool] = Field(default_factory=dict, max_length=16)
    currency: FieldName | None = None
    outcome: FieldName
    outcomes: dict[str, Literal["settled", "rejected", "reverted", "pending"]] = Field(min_length=1, max_length=32)
    at: TimeField
    amount_minor: FieldName | None = None
    decimals: Annotated[int, Field(ge=0, le=9)] = 0
    amounts: Literal["text", "number"] = "text"
    reference: FieldName | None = None
    dfid: FieldName | None = None
    kind: FieldName | None = None
    resource_key: FieldName | None = None
    params: dict[str, FieldName] = Field(default_factory=dict, max_length=32)

    @model_validator(mode="after")
    def _scaled(self) -> LineForm:
        if any(unknown_place(text, frozenset(), params=False) for text in texts_in(self.where)):
            raise ContradictionError(
                ("where",), "names no facts: a line is ours by what does not change from order to order"
            )
        if self.amounts == "number" and not self.decimals:
            raise ContradictionError(
                ("amounts",), "needs `decimals`: without, amounts are whole numbers in minor units"
            )
        return self


class StatementForm(_Part):
    """`lines`: the list in an answer, or `.`. The next page is named by a field, `next`, whose value becomes `{after}`, or by
    the answer's `Link` header. `more`: the field that says whether there is a next page.

    `first`: the `{after}` of the first page. Without it, the first path has no parameter with `{after}`.
    """

    path: PathTemplate
    lines: ListName
    next: FieldName | None = None
    next_link: bool = False
    more: FieldName | None = None
    first: str | None = None
    line: LineForm

    @model_validator(mode="after")
    def _facts(self) -> StatementForm:
        if place := unknown_place(self.path, PERIOD_FACTS, params=False):
            known = ", ".join(sorted(PERIOD_FACTS))
            raise ContradictionError(("path",), f"`{place}` is not a placeholder; placeholders are: {known}")
        if (self.next is None) == ("{after}" in self.path):
            raise ContradictionError((), "needs both `next` and `{after}` in its path, or neither")
        if self.next and self.next_link:
            raise ContradictionError(("next_link",), "must be left out: `next` names the next page")
        if self.more and not self.next:
            raise ContradictionError(("more",), "needs `next`: the field that names the next page")
        if self.next and self.first is None and "{after}" in without_after(self.path):
            raise ContradictionError(
                (), "needs `first`: its path has `{after}` outside a parameter such as `after={after}`"
            )
        if self.first is not None and not self.next:
            raise ContradictionError(("first",), "needs `next`: the field that names the next page")
        return self


class GatewayForm(_Part):
    """A whole gateway file."""

    address: Annotated[str, Field(max_length=1024), AfterValidator(_address)]
    idempotent: bool
    keys_kept_ms: Annotated[int, Field(ge=1)] | None = None
    key_form: KeyForm = "whole"
    currency: Annotated[str, Field(max_length=16)] = ""
    authentication: Authentication | None = None
    signature: SignatureForm | None = None
    tls: Tls | None = None
    proxy: Annotated[str, Field(max_length=1024)] = ""
    connections_max: Annotated[int, Field(ge=1, le=256)] = 16
    reply: ReplyForm
    order: OrderForm
    lookup: LookupForm | None = None
    void: VoidForm | None = None
    statement: StatementForm | None = None

    @model_validator(mode="after")
    def _comparable(self) -> GatewayForm:
        if self.statement and self.statement.line.currency and not self.currency:
            raise ContradictionError(
                ("statement", "line", "currency"), "needs the file's `currency`, to compare with it"
            )
        if self.statement and self.key_form != "whole" and not any("{whole_key}" in text for text in self.order.texts):
            raise ContradictionError(
                ("statement",), "lists whole keys: with `key_form`, `order` must send `{whole_key}`, too"
            )
        return self

    @model_validator(mode="after")
    def _listed_by_field(self) -> GatewayForm:
        if self.lookup is not None and self.lookup.entries and (self.lookup.reply or self.reply).key is None:
            raise ContradictionError(("lookup",), "needs a `reply` with `key`: the entries of a list have no headers")
        return self

    @model_validator(mode="after")
    def _secure(self) -> GatewayForm:
        if self.tls is not None and not self.address.startswith("https:"):
            raise ContradictionError(("tls",), "must be left out: an http:// address does not use TLS")
        if self.proxy and not self.address.startswith("https:"):
            raise ContradictionError(("proxy",), "must be left out: an http:// address is on this machine")
        shown, signed = self.authentication, self.signature
        if shown and signed and shown.header.lower() == signed.header.lower():
            raise ContradictionError(("signature", "header"), "must be another header than that of `authentication`")
        if self.proxy and "@" in self.proxy:
            raise ContradictionError(("proxy",), "must be a URL without a user name and a password")
        return self

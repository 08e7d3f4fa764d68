"""The form of a gateway file: what is sent where, and what each answer means. docs/library.md describes every field.

Nothing here uses the network: a file is checked before the first order. Secrets are named, never given.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from sds.executors.http.questions import (
    FieldName,
    FormPart,
    HeaderName,
    ListName,
    LookupForm,
    OrderForm,
    PathTemplate,
    Prefix,
    ReplyForm,
    ReverseForm,
    VoidForm,
)
from sds.executors.http.templates import PERIOD_FACTS, KeyForm, texts_in, unknown_place, without_after
from sds.host.machine import is_loopback
from sds.kernel.contract.types import ContradictionError


def _address(text: str) -> str:
    try:
        url = urlsplit(text)
        host, _ = url.hostname or "", url.port
    except ValueError:
        raise ValueError("must be a URL") from None
    # a `/` in a password leaves its rest in the path
    if "@" in text or url.query or url.fragment or not text.isprintable():
        raise ValueError("must be a URL without a user name, a password, a query or a fragment")
    if not host or not (url.scheme == "https" or (url.scheme == "http" and is_loopback(host))):
        raise ValueError("must begin with https://; http:// is only for this machine")
    return text.rstrip("/")


class SecretPlace(FormPart):
    """Where a secret is: in an environment variable or in a file. A relative file lies beside the gateway file."""

    env: str = ""
    file: str = ""

    @model_validator(mode="after")
    def _one(self) -> SecretPlace:
        if bool(self.env) == bool(self.file):
            raise ValueError("must have either `env` or `file`")
        return self


class ClientCredentials(FormPart):
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


class Authentication(FormPart):
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


class SignatureForm(FormPart):
    """The header that carries the HMAC-SHA256 of each request's body."""

    header: HeaderName
    prefix: Prefix = ""
    secret: SecretPlace
    encoding: Literal["hex", "base64"] = "hex"


class Tls(FormPart):
    """PEM files; relative ones lie beside the gateway file. `ca`: trusted instead of the system's; `certificate`: our own."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Tls:
        if self.key and not self.certificate:
            raise ContradictionError(("key",), "needs `certificate`, too")
        return self


class TimeField(FormPart):
    field: FieldName
    unit: Literal["ms", "s", "iso"] = "ms"


class LineForm(FormPart):
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


class StatementForm(FormPart):
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


class GatewayForm(FormPart):
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
    reverse: ReverseForm | None = None
    statement: StatementForm | None = None

    @model_validator(mode="after")
    def _reversed_once(self) -> GatewayForm:
        if self.reverse and not self.idempotent:
            raise ContradictionError(
                ("reverse",), "needs `idempotent: true`: a reversal may be sent again under its key"
            )
        return self

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

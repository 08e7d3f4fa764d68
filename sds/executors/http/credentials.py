"""Who is asking: a secret, or a token that is fetched with one (OAuth 2.0, client credentials: RFC 6749, section 4.4).

Secrets and tokens are never shown. A token that cannot be had means that certainly nothing was sent to the gateway.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import time
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import quote_plus

from sds.executors.http import answers, bodies
from sds.executors.http.exchange import Exchange, GatewayRequest, NoReplyError, NotSentError, Reply
from sds.executors.http.form import ClientCredentials, SecretPlace, SignatureForm
from sds.host.forks import begin_anew_in_forks
from sds.kernel.errors import UsageError
from sds.kernel.locks import acquired

SECRET_CHARS_MAX = 4096
EARLY_S = 60.0  # a token is replaced so long before it expires, or after half its time where that is later
LIFETIME_S = 300  # of a token whose answer does not say how long it lives
LIFETIME_S_MAX = 24 * 3600
TOKENS_MASKED = 8  # in what the gateway answers: an order may be under way with a token that was replaced meanwhile

_OAUTH_ERRORS = frozenset(  # RFC 6749, section 5.2: of an answer's words only these are repeated
    {
        "invalid_request",
        "invalid_client",
        "invalid_grant",
        "unauthorized_client",
        "unsupported_grant_type",
        "invalid_scope",
    }
)


class TokenError(NotSentError):
    """There is no token, so that nothing was sent to the gateway."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nothing was sent: there is no token: {why}")


class Secret:
    """A secret of this client. It is never shown. A file is read each time, so the secret can be replaced."""

    def __init__(self, place: SecretPlace, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._env = os.environ.get(place.env, "") if place.env else ""
        self._last = self.read()

    def __repr__(self) -> str:
        return "Secret(***)"

    def read(self) -> str:
        """Return the secret. Raises UsageError, which names its place and never its value."""
        named = f"variable `{self._place.env}`" if self._place.env else f"file `{self._place.file}`"
        text = self._env if self._place.env else self._in_file(named)
        if not _is_secret(text):
            raise UsageError(f"the {named} holds no secret", hint="put the secret there, one line of printable ASCII")
        self._last = text
        return text

    def hidden_in(self, text: str) -> str:
        """Return a text from the gateway with the secret masked, in case the gateway repeats it."""
        return text.replace(self._last, "***")

    def _in_file(self, named: str) -> str:
        try:
            return (self._folder / self._place.file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise UsageError(f"the secret cannot be read from the {named}") from None


class Tokens:
    """Tokens of one token endpoint, each fetched when it is needed first, and kept until shortly before it expires.

    Safe in several threads: one fetches, the others wait for its token. `exchange`: with the token endpoint. `clock`:
    seconds, by which tokens expire.
    """

    def __init__(
        self,
        form: ClientCredentials,
        folder: Path,
        exchange: Exchange,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._form, self._exchange, self._clock = form, exchange, clock
        self._id, self._secret = Secret(form.client_id, folder), Secret(form.client_secret, folder)
        self._lock = RLock()
        self._token, self._until_s = "", 0.0
        self._fetched = deque[str](maxlen=TOKENS_MASKED)
        begin_anew_in_forks(self)

    def __repr__(self) -> str:
        return "Tokens(***)"

    def begin_anew(self) -> None:
        """Forget who was fetching a token: that thread is in the parent."""
        self._lock = RLock()

    def close(self) -> None:
        self._exchange.close()

    def token(self, ends_s: float, *, instead_of: str = "") -> str:
        """Return a token, by `ends_s` of the monotonic clock; another than `instead_of`, which the gateway has refused.

        Raises TokenError, and UsageError where the client's secret cannot be read.
        """
        with acquired(self._lock, max(0.0, ends_s - time.monotonic())) as free:
            if not free:
                raise TokenError("another order waits for it, too")
            if self._token in ("", instead_of) or self._clock() >= self._until_s:
                self._fetch(ends_s)
            return self._token

    def forget(self, token: str) -> None:
        """Use a token that the gateway has refused for no further request. Waits for no other order's fetch."""
        if self._token == token:  # one fetched at this very moment may be dropped instead, and is fetched again
            self._token = ""

    def hidden_in(self, text: str) -> str:
        """Return a text from the gateway with tokens and the client's secret masked."""
        for token in tuple(self._fetched):
            text = text.replace(token, "***")
        return self._secret.hidden_in(text)

    def _fetch(self, ends_s: float) -> None:
        self._token = ""
        asked_s = self._clock()
        try:
            reply = self._exchange.ask(self._request(), ends_s - time.monotonic())
        except (NotSentError, NoReplyError) as error:
            raise TokenError(f"its endpoint gave no answer: {error}") from None
        token, lifetime_s = _token_in(reply)
        self._fetched.append(token)
        self._token, self._until_s = token, asked_s + max(lifetime_s - EARLY_S, lifetime_s / 2)

    def _request(self) -> GatewayRequest:
        fields: dict[str, Any] = {"grant_type": "client_credentials"}
        if self._form.scope:
            fields["scope"] = self._form.scope
        headers = {"Accept": "application/json", "Content-Type": bodies.content_type("form")}
        client_id, secret = self._id.read(), self._secret.read()
        if self._form.credentials_in == "body":
            fields |= {"client_id": client_id, "client_secret": secret}
        else:  # each is encoded as in a form first (section 2.3.1)
            pair = f"{quote_plus(client_id)}:{quote_plus(secret)}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return GatewayRequest("POST", self._form.token_path, headers, bodies.encoded(fields, "form"))


class Signer:
    """Signs the body of each request, an empty one too, with HMAC-SHA256."""

    def __init__(self, form: SignatureForm, folder: Path) -> None:
        self._form, self._secret = form, Secret(form.secret, folder)

    def __repr__(self) -> str:
        return "Signer(***)"

    def header(self, content: bytes) -> dict[str, str]:
        """Return the header that carries the signature. Raises UsageError where the secret cannot be read."""
        digest = hmac.new(self._secret.read().encode(), content, hashlib.sha256).digest()
        written = digest.hex() if self._form.encoding == "hex" else base64.b64encode(digest).decode()
        return {self._form.header: f"{self._form.prefix}{written}"}


def _is_secret(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= SECRET_CHARS_MAX and text.isascii() and text.isprintable()


def _token_in(reply: Reply) -> tuple[str, float]:
    """Return the token of an answer, and for how many seconds it lives. Raises TokenError, which repeats no word of it
    beyond the error codes of OAuth.
    """
    try:
        data = answers.parsed(reply)
    except ValueError:
        data = None
    if reply.status != 200 or not isinstance(data, dict):
        error = data.get("error") if isinstance(data, dict) else None
        known = f" ({error})" if isinstance(error, str) and error in _OAUTH_ERRORS else ""
        whole = "" if reply.status != 200 else ", but not with JSON"
        raise TokenError(f"its endpoint answered {reply.status}{known}{whole}")
    token, kind, lifetime_s = data.get("access_token"), data.get("token_type"), data.get("expires_in", LIFETIME_S)
    if not _is_secret(token):
        raise TokenError("the answer of its endpoint has no `access_token`")
    if not isinstance(kind, str) or kind.lower() != "bearer":
        raise TokenError("the answer of its endpoint has a `token_type` other than Bearer")
    if type(lifetime_s) not in (int, Decimal) or lifetime_s <= 0:
        raise TokenError("the answer of its endpoint has an `expires_in` that is no number of seconds")
    return str(token), float(min(lifetime_s, LIFETIME_S_MAX))

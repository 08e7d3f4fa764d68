"""Asks a gateway as the client that its file names: with a secret or a fetched token, and signed where the file says so."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sds.executors.http.credentials import Secret, Signer, Tokens
from sds.executors.http.exchange import BODY_BYTES_MAX, Exchange, GatewayRequest, NotSentError, Reply
from sds.executors.http.form import GatewayForm, Tls
from sds.kernel.errors import UsageError

UNAUTHORIZED = 401


class GatewayClient:
    """The connections to one gateway, and what shows who is asking. Safe in several threads; close it in the end.

    `folder`: where the form's relative files lie. Raises UsageError, OSError, ssl.SSLError where one cannot be read.
    """

    def __init__(self, form: GatewayForm, folder: Path) -> None:
        self._form = form
        shown = form.authentication
        oauth2 = shown.oauth2 if shown else None
        secure = any(address.startswith("https:") for address in (form.address, oauth2.token_url if oauth2 else ""))
        tls = TlsFiles(form.tls or Tls(), folder).context if secure else None
        self._exchange = _exchange(form, form.address, tls)
        self._secret = Secret(shown.secret, folder) if shown and shown.secret else None
        self._tokens = Tokens(oauth2, folder, _exchange(form, oauth2.token_address, tls)) if oauth2 else None
        self._signer = Signer(form.signature, folder) if form.signature else None

    def close(self) -> None:
        self._exchange.close()
        if self._tokens:
            self._tokens.close()

    def ask(
        self, request: GatewayRequest, ends_s: float, *, repeatable: bool, body_bytes_max: int = BODY_BYTES_MAX
    ) -> Reply:
        """Return the answer to a request that is sent by `ends_s` of the monotonic clock.

        `repeatable`: the request may be sent again. It is, once, with a fresh token, where the gateway refused the token
        (401). If that fails before anything is sent, the first answer stands, since the first request was sent. Raises
        NotSentError, NoReplyError, and UsageError where a secret cannot be read: then nothing was sent.
        """
        signed = replace(request, headers={**request.headers, **self._signature(request)})
        shown = self._shown(ends_s)
        reply = self._send(signed, shown, ends_s, body_bytes_max)
        if reply.status != UNAUTHORIZED or self._tokens is None:
            return reply
        if not repeatable:
            self._tokens.forget(shown)
            return reply
        try:
            fresh = self._tokens.token(ends_s, instead_of=shown)
            return self._send(signed, fresh, ends_s, body_bytes_max)
        except (NotSentError, UsageError):
            return reply

    def hidden_in(self, text: str) -> str:
        """Return a text from the gateway with every secret masked that it was sent."""
        known = self._tokens or self._secret
        return known.hidden_in(text) if known else text

    def _signature(self, request: GatewayRequest) -> dict[str, str]:
        return self._signer.header(request.content) if self._signer else {}

    def _shown(self, ends_s: float) -> str:
        """Return the secret or the token that shows who is asking, "" where nothing does."""
        if self._tokens:
            return self._tokens.token(ends_s)
        return self._secret.read() if self._secret else ""

    def _send(self, request: GatewayRequest, shown: str, ends_s: float, body_bytes_max: int) -> Reply:
        form = self._form.authentication
        headers = {form.header: f"{form.prefix}{shown}"} if form else {}
        known = replace(request, headers={**request.headers, **headers})
        return self._exchange.ask(known, ends_s - time.monotonic(), body_bytes_max=body_bytes_max)


def _exchange(form: GatewayForm, address: str, tls: Callable[[], ssl.SSLContext] | None) -> Exchange:
    """Return the connections to an address; one with http:// is on this machine, and has neither TLS nor a proxy."""
    secure = address.startswith("https:")
    proxy = form.proxy if secure else ""
    return Exchange(address, tls=tls if secure else None, proxy=proxy, connections_max=form.connections_max)


class TlsFiles:
    """The TLS context that a form's files make. Files that change are read again: certificates are renewed while a service
    runs. While what they hold cannot be used, the last context is.
    """

    def __init__(self, form: Tls, folder: Path) -> None:
        self._form, self._folder = form, folder
        self._stamp, self._context = self._stamp_now(), self._read()

    def context(self) -> ssl.SSLContext:
        """Return the context of the files as they are now, or as they last could be used."""
        if (stamp := self._stamp_now()) != self._stamp:
            self._stamp = stamp
            with suppress(OSError):  # ssl.SSLError, too: of two files that belong together one may be replaced later
                self._context = self._read()
        return self._context

    def _stamp_now(self) -> list[tuple[int, ...]]:
        return [_stamp(self._folder / name) for name in (self._form.ca, self._form.certificate, self._form.key) if name]

    def _read(self) -> ssl.SSLContext:
        form, folder = self._form, self._folder
        context = ssl.create_default_context(cafile=str(folder / form.ca) if form.ca else None)
        if form.certificate:
            context.load_cert_chain(str(folder / form.certificate), str(folder / form.key) if form.key else None)
        return context


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what is another once a file was replaced; () where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns

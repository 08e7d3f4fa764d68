"""Who is at the console: a key, given once, then a cookie; and that a form was sent by a page of ours.

The cookie is 256 random bits, of which the service keeps SHA-256, with the key's digest: a key that is revoked ends its
sessions. It is HttpOnly and SameSite=Strict, and Secure but on this machine's own http.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response

from sds.host.machine import is_loopback
from sds.service.callers import Caller, Callers, digest_of, is_key
from sds.service.database import Database, sessions
from sds.service.state import came_through_proxy

PATH = "/console"
ROLES = frozenset({"read", "review", "operate"})  # a key with none of these has nothing to do here
IDLE_MS = 2 * 3_600_000
WHOLE_MS = 12 * 3_600_000  # then a new log-in is asked for, whatever was done meanwhile
OF_KEY_MAX = 32  # sessions of one key; one more ends its oldest
NOTED_MS = 60_000  # how exactly it is kept when a session was last used
TRIES_MAX, TRIES_MS = 20, 60_000  # log-ins that fail, from one address
ADDRESSES_MAX = 4_096


class LoggedOutError(Exception):
    """Nobody is logged in, or not any more."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """Who is logged in. `csrf`: what every form of theirs carries; `cookie`: what the browser has."""

    caller: Caller
    key_digest: str
    csrf: str
    cookie: str

    @property
    def name(self) -> str:
        return self.caller.name

    @property
    def roles(self) -> frozenset[str]:
        return self.caller.roles


class Sessions:
    """Opens, finds and ends sessions. `token`: gives so many random bytes, as hexadecimal digits."""

    def __init__(
        self, database: Database, callers: Callers, *, now_ms: Callable[[], int], token: Callable[[int], str]
    ) -> None:
        self._database, self._callers, self._now_ms, self._token = database, callers, now_ms, token

    def open(self, key: str) -> ConsoleSession | None:
        """Return a new session for a key; None: it is none, unknown, revoked, or has no role here.

        What has not the form of a key is refused without the database. Raises Problem: 429, the key asked too often.
        """
        if not is_key(key):
            return None
        digest = digest_of(key)
        caller = self._callers.look_up(digest)
        if caller is None or not caller.roles & ROLES:
            return None
        self._callers.take_turn(digest)
        made = ConsoleSession(caller, digest, self._token(32), self._token(32))
        now_ms = self._now_ms()
        newest = sa.select(sessions.c.digest).where(sessions.c.key_digest == digest)
        newest = newest.order_by(sessions.c.made_at_ms.desc(), sessions.c.digest).limit(OF_KEY_MAX - 1)
        times = {"made_at_ms": now_ms, "seen_at_ms": now_ms}
        with self._database.transaction() as connection:
            connection.execute(sessions.delete().where(sessions.c.made_at_ms <= now_ms - WHOLE_MS))
            older = sessions.delete().where(sessions.c.key_digest == digest, sessions.c.digest.not_in(newest))
            connection.execute(older)
            connection.execute(
                sessions.insert().values(digest=digest_of(made.cookie), key_digest=digest, csrf=made.csrf, **times)
            )
        return made

    def find(self, cookie: str) -> ConsoleSession | None:
        """Return the session of a cookie; None where there is none, it is over, or its key was revoked."""
        now_ms, digest = self._now_ms(), digest_of(cookie)
        with self._database.reading() as connection:
            row = connection.execute(sa.select(sessions).where(sessions.c.digest == digest)).first()
        if row is None or now_ms >= min(row.made_at_ms + WHOLE_MS, row.seen_at_ms + IDLE_MS):
            return None
        caller = self._callers.look_up(row.key_digest)
        if caller is None:
            return None
        if now_ms - row.seen_at_ms >= NOTED_MS:
            with self._database.transaction() as connection:
                connection.execute(sessions.update().where(sessions.c.digest == digest).values(seen_at_ms=now_ms))
        return ConsoleSession(caller, row.key_digest, row.csrf, cookie)

    def end(self, session: ConsoleSession) -> None:
        with self._database.transaction() as connection:
            connection.execute(sessions.delete().where(sessions.c.digest == digest_of(session.cookie)))


class Tries:
    """Counts the log-ins that failed, by address: behind a proxy many share one, so only a wrong key has to wait."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._failed = OrderedDict[str, list[int]]()

    def wait_s(self, address: str) -> int:
        """Return how many seconds an address has to wait before its next try; 0: none."""
        now_ms = self._now_ms()
        recent = [at_ms for at_ms in self._failed.get(address, ()) if 0 <= now_ms - at_ms < TRIES_MS]
        return 0 if len(recent) < TRIES_MAX else 1 + (recent[-TRIES_MAX] + TRIES_MS - now_ms) // 1000

    def failed(self, address: str) -> None:
        self._failed.setdefault(address, []).append(self._now_ms())
        del self._failed[address][:-TRIES_MAX]
        self._failed.move_to_end(address)
        while len(self._failed) > ADDRESSES_MAX:
            self._failed.popitem(last=False)


def is_secure(request: Request) -> bool:
    """Tell whether cookies are to be sent over TLS alone: always, but where a browser asks this machine itself by http, and no
    proxy asks for it, which may have put this machine's name in the place of its own.
    """
    asked_here = is_loopback(request.url.hostname or "") and not came_through_proxy(request)
    return request.url.scheme == "https" or not asked_here


def cookie_of(request: Request, name: str) -> str:
    return request.cookies.get(_name(request, name), "")[:200]


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """Give the browser a cookie of ours; an empty value takes it away."""
    secure = is_secure(request)
    # a name that begins with `__Host-` is taken only with Secure, this path and no domain: no neighbour can set it
    response.set_cookie(
        _name(request, name),
        value,
        max_age=None if value else 0,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def _name(request: Request, name: str) -> str:
    return f"__Host-{name}" if is_secure(request) else name


def login_csrf(cookie: str) -> str:
    """Return what the log-in form carries: nobody is logged in yet, so it stands for a cookie of its own, never for none."""
    return sha256(f"log-in form {cookie}".encode()).hexdigest()


def is_ours(request: Request, sent: str, expected: str) -> bool:
    """Tell whether a form comes from a page of ours: by what it carries, and by what the browser says of it."""
    said = request.headers.get("sec-fetch-site", "same-origin")
    return said in ("same-origin", "none") and hmac.compare_digest(sent.encode(), expected.encode())

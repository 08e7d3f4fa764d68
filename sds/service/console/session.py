"""Sessions of the console: a key is given once, then a cookie stands for it; and the check that a form came from our page.

The cookie is 256 random bits. The service stores its SHA-256 with the key's digest, so that revoking a key ends its
sessions. The cookie is HttpOnly and SameSite=Strict, and Secure except for plain http on this machine.
"""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response

from sds.service.callers import Caller, Callers, digest_of, is_key
from sds.service.database import Database, sessions
from sds.service.state import asks_for_this_machine

PATH = "/console"
_PAGE = re.compile(rf"{PATH}(?:/live|/find|/next|/(?:cases|decisions)/[^/?#]+/[^/?#]+)?(?:\?[^#]*)?")
_FORM = re.compile(rf"({PATH}(?:/cases/[^/]+/[^/]+)?)/(?:take|logout)?|({PATH}/live)/[^/]*")
ROLES = frozenset({"read", "review", "operate"})  # a key needs one of these to open a session
IDLE_MS = 2 * 3_600_000  # a session ends after this time without use
WHOLE_MS = 12 * 3_600_000  # a session ends after this time, used or not
OF_KEY_MAX = 32  # sessions of one key; one more ends its oldest
NOTED_MS = 60_000  # how often the time of a session's last use is written at most
TRIES_MAX, TRIES_MS = 20, 60_000  # failed log-ins from one address, within this time
ADDRESSES_MAX = 4_096
COOKIE_CHARS_MAX = 3_600  # browsers keep 4,096 bytes of a cookie, its name and attributes included
ADDRESS_CHARS_MAX = 2_000  # of a page that a log-in leads to


def is_page(address: str) -> bool:
    """Tell whether an address is one of the console's pages, which a log-in may lead to: the browser is sent to no other."""
    return len(address) <= ADDRESS_CHARS_MAX and _PAGE.fullmatch(address) is not None


def page_of(address: str) -> str:
    """Return the address of the page that a form's address belongs to, with its query; any other address as it is."""
    path, mark, query = address.partition("?")
    form = _FORM.fullmatch(path)
    return (form[1] or form[2] if form else path) + mark + query


class LoggedOutError(Exception):
    """The request has no session, or one that has ended."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """One session. `csrf`: the token that each of its forms carries; `cookie`: the browser's cookie."""

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
    """Opens, finds and ends sessions. `token(n)`: returns n random bytes as hexadecimal digits. Methods raise StoreError."""

    def __init__(
        self, database: Database, callers: Callers, *, now_ms: Callable[[], int], token: Callable[[int], str]
    ) -> None:
        self._database, self._callers, self._now_ms, self._token = database, callers, now_ms, token

    def open(self, key: str) -> ConsoleSession | None:
        """Return a new session for a key; None: the key is malformed, unknown, revoked, or lacks `ROLES`.

        A malformed key is refused without reading the database. Raises Problem (429) where the key has asked too often.
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

    def find(self, cookie: str, *, used: bool = True) -> ConsoleSession | None:
        """Return the session of a cookie; None where there is none, it has ended, or its key was revoked.

        `used`: a person asks. What a page asks by itself does not prolong its session.
        """
        now_ms, digest = self._now_ms(), digest_of(cookie)
        with self._database.reading() as connection:
            row = connection.execute(sa.select(sessions).where(sessions.c.digest == digest)).first()
        if row is None or now_ms >= min(row.made_at_ms + WHOLE_MS, row.seen_at_ms + IDLE_MS):
            return None
        caller = self._callers.look_up(row.key_digest)
        if caller is None:
            return None
        if used and now_ms - row.seen_at_ms >= NOTED_MS:
            with self._database.transaction() as connection:
                connection.execute(sessions.update().where(sessions.c.digest == digest).values(seen_at_ms=now_ms))
        return ConsoleSession(caller, row.key_digest, row.csrf, cookie)

    def end(self, session: ConsoleSession) -> None:
        with self._database.transaction() as connection:
            connection.execute(sessions.delete().where(sessions.c.digest == digest_of(session.cookie)))


class Tries:
    """Counts failed log-ins by address. Only wrong keys have to wait, since many users share the address of a proxy."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._failed = OrderedDict[str, list[int]]()

    def wait_s(self, address: str) -> int:
        """Return how many seconds an address has to wait after another wrong key; 0: it need not wait."""
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
    """Tell whether cookies are Secure: always, unless the request asks for this machine by http."""
    return request.url.scheme == "https" or not asks_for_this_machine(request)


def cookie_of(request: Request, name: str) -> str:
    return request.cookies.get(_name(request, name), "")[:COOKIE_CHARS_MAX]


def set_cookie(request: Request, response: Response, name: str, value: str, *, max_age_s: int | None = None) -> None:
    """Set a cookie in the browser; an empty value deletes it. `max_age_s`: None: until the browser is closed."""
    secure = is_secure(request)
    # browsers accept `__Host-` names only with Secure, path `/` and no domain: no other host can set such a cookie
    response.set_cookie(
        _name(request, name),
        value,
        max_age=max_age_s if value else 0,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def _name(request: Request, name: str) -> str:
    return f"__Host-{name}" if is_secure(request) else name


def login_csrf(cookie: str) -> str:
    """Return the CSRF token of the log-in form. There is no session yet, so it is derived from a cookie of its own."""
    return sha256(f"log-in form {cookie}".encode()).hexdigest()


def is_ours(request: Request, sent: str, expected: str) -> bool:
    """Tell whether a form was sent by a page of ours: by its CSRF token, and by the browser's `Sec-Fetch-Site`."""
    said = request.headers.get("sec-fetch-site", "same-origin")
    return said in ("same-origin", "none") and hmac.compare_digest(sent.encode(), expected.encode())

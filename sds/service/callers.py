"""API keys and their callers: roles, gates, and rate limits. A key is `sds_` and 256 random bits; its SHA-256 is stored.

A key is looked up by its digest, so the time of a comparison reveals nothing about other keys. A look-up is cached for
`key_cache_ms`: a revoked key may be accepted for that long.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool

from sds.kernel.errors import UsageError
from sds.service.database import Database, api_keys
from sds.service.problems import Problem

ROLES = ("submit", "read", "review", "operate")
ALL = "*"
PREFIX = "sds_"
KNOWN_MAX = 4_096  # callers cached at once, and rate-limit buckets
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_KEY = re.compile(r"sds_[A-Za-z0-9_-]{43}")
_GOOD_KEY = sa.select(api_keys.c.name, api_keys.c.roles, api_keys.c.gates).where(
    api_keys.c.digest == sa.bindparam("digest"), api_keys.c.revoked_at_ms.is_(None)
)

bearer = HTTPBearer(auto_error=False, description="`sds keys add` makes a key: `sds_...`")


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key: their roles, and their gates. `*` in `gates` stands for every gate."""

    name: str
    roles: frozenset[str]
    gates: frozenset[str]

    def may_see(self, gate: str) -> bool:
        return ALL in self.gates or gate in self.gates

    def check(self, role: str, gate: str | None = None) -> None:
        """Raise Problem where the role or the gate is missing."""
        if role not in self.roles:
            raise Problem("ROLE_MISSING", f"the key of `{self.name}` lacks the role `{role}`")
        if gate is not None and not self.may_see(gate):
            raise Problem("GATE_FORBIDDEN", f"the key of `{self.name}` is not for this gate")


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_ms: int


class Callers:
    """Finds the caller of a request. `dev_keys`: digests of keys with every role and gate that are not in the database."""

    def __init__(
        self,
        database: Database,
        *,
        now_ms: Callable[[], int],
        rate_per_s: float,
        rate_burst: int,
        cache_ms: int,
        dev_keys: Iterable[str] = (),
    ) -> None:
        self._good_key, self._now_ms = database.prepared(_GOOD_KEY), now_ms
        self._rate_per_s, self._rate_burst, self._cache_ms = rate_per_s, rate_burst, cache_ms
        self._dev = {digest: Caller("dev", frozenset(ROLES), frozenset({ALL})) for digest in dev_keys}
        self._known = OrderedDict[str, tuple[Caller, int]]()
        self._buckets, self._turns = OrderedDict[str, _Bucket](), threading.Lock()

    async def of(self, authorization: str | None) -> Caller:
        """Return the caller of an `Authorization` header. Raises Problem (401, 429), StoreError."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not is_key(key):
            raise Problem("UNAUTHENTICATED")
        digest = digest_of(key)
        caller = self._dev.get(digest) or self._remembered(digest) or await run_in_threadpool(self.look_up, digest)
        if caller is None:
            raise Problem("UNAUTHENTICATED")
        self.take_turn(digest)
        return caller

    def look_up(self, digest: str) -> Caller | None:
        """Return the caller of a key's digest from the database; None: unknown or revoked. Raises StoreError."""
        if digest in self._dev:
            return self._dev[digest]
        asked_ms = self._now_ms()
        rows = self._good_key({"digest": digest})
        if not rows:
            self._known.pop(digest, None)
            return None
        ((name, roles, gates),) = rows
        caller = Caller(name, frozenset(roles.split(",")), frozenset(gates.split(",")))
        self._known[digest] = (caller, asked_ms)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return caller

    def _remembered(self, digest: str) -> Caller | None:
        known = self._known.get(digest)
        return known[0] if known is not None and 0 <= self._now_ms() - known[1] < self._cache_ms else None

    def take_turn(self, digest: str) -> None:
        """Take one token from the key's bucket. Raises Problem (429) where there is none. Thread-safe."""
        now_ms = self._now_ms()
        with self._turns:
            bucket = self._buckets.setdefault(digest, _Bucket(self._rate_burst, now_ms))
            self._buckets.move_to_end(digest)
            while len(self._buckets) > KNOWN_MAX:
                self._buckets.popitem(last=False)
            gained = max(0, now_ms - bucket.at_ms) / 1000 * self._rate_per_s
            bucket.tokens, bucket.at_ms = min(self._rate_burst, bucket.tokens + gained), now_ms
            if bucket.tokens < 1:
                raise Problem("RATE_LIMITED", retry_after_s=(1 - bucket.tokens) / self._rate_per_s)
            bucket.tokens -= 1


def caller(role: str) -> Callable[..., object]:
    """Return a route's dependency: the caller, who must have the role, and the gate where the path names one."""

    async def authorised(request: Request, _: object = Security(bearer)) -> Caller:
        who: Caller = await request.app.state.service.callers.of(request.headers.get("authorization"))
        who.check(role, request.path_params.get("gate"))
        return who

    return authorised


# Parameter types of routes: `who: Submitter` is a caller that has the role `submit`
Submitter = Annotated[Caller, Depends(caller("submit"))]
Viewer = Annotated[Caller, Depends(caller("read"))]
Reviewer = Annotated[Caller, Depends(caller("review"))]
Operator = Annotated[Caller, Depends(caller("operate"))]


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def is_key(text: str) -> bool:
    """Tell whether a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as the database stores it. `revoked_at_ms`: None while the key is valid."""

    name: str
    roles: tuple[str, ...]
    gates: tuple[str, ...]
    made_at_ms: int
    revoked_at_ms: int | None
    digest: str


def add_key(database: Database, name: str, roles: Iterable[str], gates: Iterable[str], *, now_ms: int) -> str:
    """Make a key and return it; only its digest is stored. Raises UsageError: a bad or taken name, a bad or no role, no gate."""
    roles, gates = tuple(dict.fromkeys(roles)), tuple(dict.fromkeys(gates))
    if not NAME.fullmatch(name):
        hint = "use 1 to 64 letters, digits, `_`, `.`, `@` and `-`, the first of them a letter or a digit"
        raise UsageError(f"`{name[:80]}` cannot be the name of a key", hint=hint)
    if unknown := [role for role in roles if role not in ROLES]:
        raise UsageError(f"there is no role `{unknown[0][:40]}`", hint=f"roles are: {', '.join(ROLES)}")
    if not roles or not gates:
        raise UsageError("a key needs a role and a gate", hint="for example: --role submit,read --gate refund")
    key = new_key()
    with database.transaction() as connection:
        if connection.execute(sa.select(api_keys.c.name).where(api_keys.c.name == name)).first() is not None:
            hint = "choose another name: the ledger names people by it, so no name is used twice"
            raise UsageError(f"a key `{name}` exists already, or existed and was revoked", hint=hint)
        connection.execute(
            api_keys.insert().values(
                digest=digest_of(key), name=name, roles=",".join(roles), gates=",".join(gates), made_at_ms=now_ms
            )
        )
    return key


def stored_keys(database: Database) -> list[StoredKey]:
    """Return every key that was made, revoked ones included, oldest first."""
    with database.reading() as connection:
        rows = connection.execute(sa.select(api_keys).order_by(api_keys.c.made_at_ms, api_keys.c.name)).all()
    return [
        StoredKey(
            row.name,
            tuple(row.roles.split(",")),
            tuple(row.gates.split(",")),
            row.made_at_ms,
            row.revoked_at_ms,
            row.digest,
        )
        for row in rows
    ]


def revoke_key(database: Database, name: str, *, now_ms: int) -> bool:
    """Revoke a key for good; return False where it is revoked already. Raises UsageError where there is no such key."""
    with database.transaction() as connection:
        known = connection.execute(sa.select(api_keys.c.revoked_at_ms).where(api_keys.c.name == name)).first()
        if known is None:
            raise UsageError(f"there is no key `{name[:80]}`", hint="sds keys list")
        if known.revoked_at_ms is not None:
            return False
        connection.execute(api_keys.update().where(api_keys.c.name == name).values(revoked_at_ms=now_ms))
    return True

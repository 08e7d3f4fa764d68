"""The endpoints of webhooks and their positions, in the service's database.

A position is the last entry of a gate's ledger that was delivered to an endpoint, or skipped. Undelivered changes stay in the
ledger alone. Secrets are stored in plain text: whoever can read this database can sign as this service.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import sqlalchemy as sa

from sds.host.machine import is_loopback
from sds.kernel.errors import UsageError
from sds.kernel.storage.store import Reader
from sds.service.database import Database, webhook_positions, webhooks

ENDPOINTS_MAX = 64
URL_CHARS_MAX = 2_000
SECRET_BYTES, SECRET_BYTES_MIN, SECRET_BYTES_MAX = 32, 24, 64  # of a new secret, and the limits of Standard Webhooks
_PREFIX = "whsec_"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_AT = webhook_positions.c


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that final states of some gates are sent to. Its repr hides the secret, and the URL, for it may hold one."""

    name: str
    gates: tuple[str, ...]
    made_at_ms: int
    url: str
    secret: str

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, gates={self.gates!r})"


@dataclass(frozen=True, slots=True)
class EndpointPosition:
    """How far an endpoint has received one gate's ledger. `idx`, `entry_hash`, `at_ms`: of the last entry that was delivered
    or skipped; 0 and "" without one. `attempts`: failed ones at the next delivery. Times are milliseconds since 1970.
    """

    webhook: str
    gate: str
    idx: int
    entry_hash: str
    at_ms: int
    attempts: int = 0
    next_at_ms: int = 0
    failing_since_ms: int | None = None
    failure: str | None = None


def add_endpoint(
    database: Database, url: str, records: Mapping[str, Reader], *, name: str, secret: str, now_ms: int
) -> Endpoint:
    """Store and return an endpoint for the gates of `records`, for changes from now on. `name`, `secret`: "" makes one.

    Raises UsageError: a URL, name or secret that is invalid, a name that is taken, no gate, `ENDPOINTS_MAX` reached.
    """
    name = name or f"wh-{secrets.token_hex(4)}"
    endpoint = Endpoint(name, tuple(records), now_ms, checked_url(url), checked_secret(secret))
    if not _NAME.fullmatch(name):
        hint = "use 1 to 64 lower-case letters, digits, `_` and `-`, the first of them a letter or a digit"
        raise UsageError(f"`{name[:80]}` cannot be the name of a webhook", hint=hint)
    if not records:
        raise UsageError("a webhook needs a gate", hint="for example: --gate refund")
    with database.transaction() as connection:
        names = [row.name for row in connection.execute(sa.select(webhooks.c.name))]
        if name in names:
            raise UsageError(f"there is a webhook `{name}` already", hint="choose another name")
        if len(names) >= ENDPOINTS_MAX:
            raise UsageError(f"there are {ENDPOINTS_MAX} webhooks already", hint="remove one: sds webhooks remove NAME")
        connection.execute(
            webhooks.insert().values(
                name=name, url=endpoint.url, secret=endpoint.secret, gates=",".join(records), made_at_ms=now_ms
            )
        )
        for gate, record in records.items():
            last = record.row("SELECT idx, entry_hash, at_ms FROM ledger ORDER BY idx DESC LIMIT 1") or (0, "", 0)
            idx, entry_hash, at_ms = last
            connection.execute(
                webhook_positions.insert().values(
                    webhook=name, gate=gate, idx=idx, entry_hash=entry_hash, at_ms=at_ms, attempts=0, next_at_ms=0
                )
            )
    return endpoint


def checked_url(url: str) -> str:
    """Return a URL that may be sent to. Raises UsageError: no host, a user, a fragment, no https but for loopback hosts."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("the URL of the endpoint is invalid", hint="give it as https://HOST/PATH")
    if parts.username is not None or parts.password is not None or parts.fragment:
        hint = "leave them out: deliveries are signed instead"
        raise UsageError("the URL of the endpoint must have no user, password or fragment", hint=hint)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise UsageError("the URL of the endpoint must begin with https://", hint="http:// is only for this machine")
    return url


def checked_secret(secret: str) -> str:
    """Return a secret in the form `whsec_` + base64; a new one for "". Raises UsageError; its message omits the secret."""
    if not secret:
        return _PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    try:
        size = len(base64.b64decode(secret.removeprefix(_PREFIX), validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if not secret.startswith(_PREFIX) or not SECRET_BYTES_MIN <= size <= SECRET_BYTES_MAX:
        hint = f"give `{_PREFIX}`, followed by {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes in base64"
        raise UsageError("the secret of the webhook is invalid", hint=hint)
    return secret


def remove_endpoint(database: Database, name: str) -> None:
    """Remove an endpoint and its positions: nothing more is delivered to it. Raises UsageError where there is none."""
    with database.transaction() as connection:
        if not connection.execute(webhooks.delete().where(webhooks.c.name == name)).rowcount:
            raise UsageError(f"there is no webhook `{name[:80]}`", hint="sds webhooks list")
        connection.execute(webhook_positions.delete().where(_AT.webhook == name))


def endpoints(database: Database) -> list[Endpoint]:
    """Return every endpoint, oldest first."""
    with database.reading() as connection:
        rows = connection.execute(sa.select(webhooks).order_by(webhooks.c.made_at_ms, webhooks.c.name)).all()
    return [Endpoint(row.name, tuple(row.gates.split(",")), row.made_at_ms, row.url, row.secret) for row in rows]


def positions(database: Database, gate: str | None = None) -> list[EndpointPosition]:
    """Return the positions of all endpoints, for one gate or for all."""
    wanted = sa.select(webhook_positions).order_by(_AT.webhook, _AT.gate)
    with database.reading() as connection:
        rows = connection.execute(wanted if gate is None else wanted.where(_AT.gate == gate)).mappings().all()
    return [EndpointPosition(**row) for row in rows]


def move_position(database: Database, at: EndpointPosition, idx: int, entry_hash: str, at_ms: int) -> bool:
    """Move a position to an entry, and reset its failures; return False where it was removed or moved meanwhile."""
    well = {"attempts": 0, "next_at_ms": 0, "failing_since_ms": None, "failure": None}
    return _update(database, at, idx=idx, entry_hash=entry_hash, at_ms=at_ms, **well)


def write_failure(database: Database, at: EndpointPosition, failure: str, *, now_ms: int, next_at_ms: int) -> bool:
    """Record a failed delivery and the time of the next attempt; return False as `move_position` does."""
    since_ms = now_ms if at.failing_since_ms is None else at.failing_since_ms
    return _update(
        database, at, attempts=at.attempts + 1, next_at_ms=next_at_ms, failing_since_ms=since_ms, failure=failure
    )


def _update(database: Database, at: EndpointPosition, **values: object) -> bool:
    mine = sa.and_(_AT.webhook == at.webhook, _AT.gate == at.gate, _AT.idx == at.idx)
    with database.transaction() as connection:
        return connection.execute(webhook_positions.update().where(mine).values(values)).rowcount == 1

"""Reference texts that a model reads with its contract (DIR 3.4): an operator puts them in force, by name and version.

A name has at most one version in force. The ledger says who put or retired which, when and why, with the text's SHA-256.
The text itself is in the table until it is out of force and retention has swept it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sds.kernel.canonical import REASON_CHARS_MAX, one_line, person, reason_line, sha256_hex
from sds.kernel.decision.context import Artifact
from sds.kernel.errors import UsageError
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

ARTIFACT_BYTES_MAX = 64 * 1024
SWEEP_MAX = 1_000
DAY_MS = 24 * 3600 * 1000

_NAME = re.compile("[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Listed:
    """What the store knows of one version. `ended_at_ms`: since when it is out of force; None: it is in force."""

    name: str
    version: int
    sha256: str
    ended_at_ms: int | None
    swept: bool


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep removed. `more`: there is more to remove than one sweep does."""

    artifacts: int
    more: bool


def put(store: Store, name: str, text: str, *, who: str, reason: str, now_ms: int) -> Artifact:
    """Put a text in force under a name, replacing its last version. The same text again changes nothing.

    Raises UsageError for an unusable name, text or reason.
    """
    _check(name, text)
    digest = sha256_hex(text.encode())
    with store.transaction():
        last = store.row("SELECT version, sha256, ended_at_ms FROM artifacts WHERE name = ? ORDER BY 1 DESC", (name,))
        if last is not None and last[1:] == (digest, None):
            return Artifact(name, last[0], digest, text)
        version = last[0] + 1 if last else 1
        _end(store, name, now_ms)
        store.insert("artifacts", name=name, version=version, sha256=digest, text=text)
        _write(store, "put", (name, version, digest), who, reason, now_ms)
    return Artifact(name, version, digest, text)


def retire(store: Store, name: str, *, who: str, reason: str, now_ms: int) -> None:
    """Take a name out of force; a contract that names it escalates from then on. Raises UsageError: it is not in force."""
    with store.transaction():
        found = store.row("SELECT version, sha256 FROM artifacts WHERE name = ? AND ended_at_ms IS NULL", (name,))
        if found is None:
            raise UsageError(f"there is no artifact `{name}` in force", hint="sds artifacts list")
        _end(store, name, now_ms)
        _write(store, "retire", (name, *found), who, reason, now_ms)


def listed(store: Reader) -> list[Listed]:
    """Return every version there is or was, by name, newest last."""
    rows = store.rows("SELECT name, version, sha256, ended_at_ms, text IS NULL FROM artifacts ORDER BY name, version")
    return [Listed(name, version, digest, ended, bool(swept)) for name, version, digest, ended, swept in rows]


def sweep(store: Store, *, days_max: int, who: str, reason: str, now_ms: int) -> Swept:
    """Remove the texts that have been out of force for more than `days_max` days. What the record proves stays."""
    before_ms = now_ms - days_max * DAY_MS
    with store.transaction():
        past = store.rows(
            "SELECT name, version FROM artifacts WHERE text IS NOT NULL AND ended_at_ms < ? ORDER BY 1, 2 LIMIT ?",
            (before_ms, SWEEP_MAX + 1),
        )
        taken = past[:SWEEP_MAX]
        for key in taken:
            store.run("UPDATE artifacts SET text = NULL WHERE name = ? AND version = ?", key)
        body = {"artifacts": taken, "count": len(taken), "before_ms": before_ms}
        ledger.append(store, now_ms, "RETENTION", "", body | _by(who, reason))
    return Swept(len(taken), more=len(past) > SWEEP_MAX)


def _check(name: str, text: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"`{one_line(name, 64)}` is not a name in_lower_case")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError("the artifact is not text that can be stored as UTF-8") from error
    if not text.strip() or size > ARTIFACT_BYTES_MAX:
        raise UsageError(f"the artifact is not 1 to {ARTIFACT_BYTES_MAX} bytes of text")
    if not all(c.isprintable() or c in "\n\t" for c in text):
        raise UsageError("the artifact has characters that cannot be printed")


def _end(store: Store, name: str, now_ms: int) -> None:
    store.run("UPDATE artifacts SET ended_at_ms = ? WHERE name = ? AND ended_at_ms IS NULL", (now_ms, name))


def _write(store: Store, act: str, of: tuple[str, int, str], who: str, reason: str, now_ms: int) -> None:
    name, version, digest = of
    body = {"act": act, "name": name, "version": version, "sha256": digest}
    ledger.append(store, now_ms, "ARTIFACT", "", body | _by(who, reason))


def _by(who: str, reason: str) -> dict[str, str]:
    why = reason_line(reason)
    if not why:
        raise UsageError("a reason is needed")
    return {"who": person(who, REASON_CHARS_MAX), "reason": why}

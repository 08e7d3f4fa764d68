"""Moves a gate's record from its file into PostgreSQL, or back: the same rows, the same ledger, the same head."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sds.host import paths
from sds.host.backup import refuse_damaged
from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.registry import registry
from sds.kernel.storage import copying
from sds.kernel.storage.ledger import Head, head
from sds.kernel.storage.store import Store


@dataclass(frozen=True, slots=True)
class Moved:
    """How many rows were copied, where to, and the head of both records."""

    rows: int
    to: str
    head: Head


def move(folder: Path, source: Store, url: str | None, *, who: str, reason: str, now_ms: int) -> Moved:
    """Copy the record of a folder into an empty one: into PostgreSQL at `url`, else into the folder's file.

    The gate must be halted. Neither record decides until somebody resumes one of them, which must be the new one. The
    copy is compared and verified; if that finds a fault, the new record must not be used, and the old one says that it is back.
    Raises UsageError, StoreError.
    """
    why = registry.reason_given(reason)  # before the other record is made
    _refuse_deciding(source)
    if url is None and paths.is_there(paths.decisions_path(folder)):
        raise UsageError(
            f"`{paths.decisions_path(folder)}` already exists", hint="move that file away, if it is not in use"
        )
    refuse_damaged(verify.verify(source, None, paths.public_keys_of(folder)), "sds ledger verify --gate GATE")
    with closing(paths.open_record_at(folder, url)) as target:
        if target.name == source.name:
            raise UsageError("the record is already in that store", hint="name another store with --to")
        if copying.rows_there(target):
            raise UsageError(
                f"`{target.name}` already holds a record", hint="name another database, or drop that schema"
            )
        with source.transaction():  # keeps others from writing while it is copied
            _refuse_deciding(source)  # again: somebody may have resumed it during the verification
            registry.append_act(source, "MOVED", who=who, reason=why, now_ms=now_ms, facts={"to": target.name})
            rows = copying.copy(source, target)
            _refuse_differing(source, target)
            reached = head(source)
        found = verify.verify(target, reached, paths.public_keys_of(folder))
        if found.faults:
            with source.transaction():
                registry.append_act(source, "MOVED", who=who, reason=why, now_ms=now_ms, facts={"to": source.name})
            raise StoreError(
                f"the copy is damaged: {found.faults[0]}", hint="drop the copy; the old record is unchanged"
            )
        return Moved(rows, target.name, found.head)


def _refuse_deciding(source: Store) -> None:
    if not source.halted:
        message = "the gate is not halted: what it pays during the move would be in one record only"
        raise UsageError(message, hint='sds halt --gate GATE --reason "..."')


def _refuse_differing(source: Store, target: Store) -> None:
    with target.frozen() as copied:
        if tables := copying.differing(source, copied):
            raise StoreError(f"the copy differs in {', '.join(tables)}")

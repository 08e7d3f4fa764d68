"""Answers under an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): the same key and event give the first
answer, byte for byte.

A key is claimed for an event before that is decided, so that another event under it is refused also while the first is
under way. A key is one caller's, at one gate. What decides only once is the event's own id: keys that are lost cost
nothing but the first answer's wording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

import orjson
import sqlalchemy as sa

from sds.gate import Gate
from sds.kernel.flow.answer import answer
from sds.kernel.flow.intake import Event
from sds.kernel.storage.vault import recognises
from sds.service.database import Database, idempotency
from sds.service.problems import Problem

SWEPT_MAX = 1_000  # rows removed at once
SWEEP_EVERY_MS = 60_000

_ERASED = "SELECT 1 FROM erasures WHERE gate = ? AND event_id = ?"
_ERASED_SINCE = "SELECT event_id FROM erasures WHERE gate = ? AND erased_at_ms >= ?"
_DECIDED_BY_AGENT = ("outcome", "reason_code", "confidence")
_DECIDED = (*_DECIDED_BY_AGENT, "action", "params")
_KEPT = idempotency.c
_SELECT = sa.select(_KEPT.fingerprint, _KEPT.event_id, _KEPT.dfid, _KEPT.status, _KEPT.body)


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """One key of one caller at one gate, and the event it is to stand for. `fingerprint`: as the record recognises that."""

    caller: str
    gate: str
    key: str
    event_id: str
    fingerprint: str

    @property
    def where(self) -> sa.ColumnElement[bool]:
        """Return the condition under which a row is this key's."""
        return sa.and_(_KEPT.caller == self.caller, _KEPT.gate == self.gate, _KEPT.key == self.key)

    @property
    def same_event(self) -> sa.ColumnElement[bool]:
        """Return the condition under which a row stands for this event."""
        return sa.and_(_KEPT.event_id == self.event_id, _KEPT.fingerprint == self.fingerprint)

    def values(self, now_ms: int) -> dict[str, object]:
        """Return the row of a key that was claimed."""
        return {**asdict(self), "made_at_ms": now_ms}


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What was answered under a key first."""

    status: int
    dfid: str
    body: bytes


class KeptAnswers:
    """The answers of a service. `kept_ms`: how long each is. Blocks: call it in a thread."""

    def __init__(self, database: Database, *, now_ms: Callable[[], int], kept_ms: int) -> None:
        self._database, self._now_ms, self._kept_ms = database, now_ms, kept_ms
        self._swept_at_ms = 0

    def find(self, claim: KeyClaim, gate: Gate, event: Event) -> KeptAnswer | None:
        """Return what was answered under a key, by reading alone. Raises Problem where it stands for another event.

        What the record did not decide so, since it was put back from a backup meanwhile, is forgotten.
        """
        with self._database.reading() as connection:
            row = connection.execute(_SELECT.where(claim.where)).first()
        found = None if row is None else _checked(row, gate, event)
        if found is None:
            return None
        if gate.store.value(_ERASED, (claim.gate, claim.event_id)) is not None:
            self._forget(claim.gate, [claim.event_id])
            return None
        if found.status == HTTPStatus.OK and not _is_of(gate, found):
            self.forget(claim, found)
            return None
        return found

    def claim(self, claim: KeyClaim, gate: Gate, event: Event) -> KeptAnswer | None:
        """KeyClaim a key for an event; return what was answered under it meanwhile. Raises Problem as `find` does."""
        self._sweep_now_and_then()
        now_ms = self._now_ms()
        with self._database.transaction() as connection:
            connection.execute(self._database.insert(idempotency).values(claim.values(now_ms)).on_conflict_do_nothing())
            row = connection.execute(_SELECT.where(claim.where)).first()
        return None if row is None else _checked(row, gate, event)

    def keep(self, claim: KeyClaim, answer: KeptAnswer) -> KeptAnswer:
        """Keep an answer, unless one is kept; return the one that is. Where the key was released meanwhile and stands for
        another event, the answer itself is returned, and not kept.
        """
        kept = {"status": answer.status, "dfid": answer.dfid, "body": answer.body}
        insert = self._database.insert(idempotency).values({**claim.values(self._now_ms()), **kept})
        columns = (_KEPT.caller, _KEPT.gate, _KEPT.key)
        open_still = sa.and_(_KEPT.body.is_(None), claim.same_event)
        with self._database.transaction() as connection:
            connection.execute(insert.on_conflict_do_update(index_elements=columns, set_=kept, where=open_still))
            row = connection.execute(_SELECT.where(claim.where, claim.same_event)).first()
        return answer if row is None else KeptAnswer(row.status, row.dfid, bytes(row.body))

    def release(self, claim: KeyClaim) -> None:
        """Forget a key under which nothing was answered, where it stands for the claim's own event."""
        with self._database.transaction() as connection:
            connection.execute(idempotency.delete().where(claim.where, claim.same_event, _KEPT.body.is_(None)))

    def forget(self, claim: KeyClaim, answer: KeptAnswer) -> None:
        """Forget an answer that is kept under a key, where it is still this one."""
        with self._database.transaction() as connection:
            connection.execute(idempotency.delete().where(claim.where, _KEPT.body == answer.body))

    def sweep(self) -> int:
        """Remove up to `SWEPT_MAX` answers that were kept long enough; return how many."""
        columns = (_KEPT.caller, _KEPT.gate, _KEPT.key)
        old = sa.select(*columns).where(_KEPT.made_at_ms < self._now_ms() - self._kept_ms).limit(SWEPT_MAX)
        with self._database.transaction() as connection:
            return connection.execute(idempotency.delete().where(sa.tuple_(*columns).in_(old))).rowcount

    def forget_erased(self, gate: Gate) -> int:
        """Remove what was answered about events of a gate whose texts were erased since; return how many answers."""
        name = gate.contract.gate
        erased = gate.store.rows(_ERASED_SINCE, (name, self._now_ms() - self._kept_ms))
        return self._forget(name, [event_id for (event_id,) in erased])

    def _forget(self, gate: str, event_ids: Sequence[str]) -> int:
        removed = 0
        for at in range(0, len(event_ids), SWEPT_MAX):
            those = _KEPT.event_id.in_(event_ids[at : at + SWEPT_MAX])
            with self._database.transaction() as connection:
                removed += connection.execute(idempotency.delete().where(_KEPT.gate == gate, those)).rowcount
        return removed

    def _sweep_now_and_then(self) -> None:
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._swept_at_ms < SWEEP_EVERY_MS:
            self._swept_at_ms = now_ms
            self.sweep()


def claim_of(caller: str, gate: Gate, key: str, event: Event) -> KeyClaim:
    """Return what is claimed when a caller sends an event under a key."""
    return KeyClaim(caller, gate.contract.gate, key, event.id, gate.store.keyring.fingerprints(_body(event))[0])


def _checked(row: Any, gate: Gate, event: Event) -> KeptAnswer | None:
    if not recognises(gate.store, row.fingerprint, _body(event)):
        raise Problem("KEY_CONFLICT", dfid=row.dfid or _dfid(gate, row.event_id))
    return None if row.body is None else KeptAnswer(row.status, row.dfid, bytes(row.body))


def _is_of(gate: Gate, kept: KeptAnswer) -> bool:
    """Tell whether the record has made the decision that was answered. What came of it since does not count."""
    now, said = answer(gate.store, kept.dfid), orjson.loads(kept.body)
    if now is None:
        return False
    decided = _DECIDED if said["resolution"] == now.resolution else _DECIDED_BY_AGENT
    return all(said[name] == getattr(now, name) for name in decided)


def _body(event: Event) -> str:
    return event.original or event.body


def _dfid(gate: Gate, event_id: str) -> str:
    found = gate.store.value("SELECT dfid FROM events WHERE gate = ? AND event_id = ?", (gate.contract.gate, event_id))
    return str(found or "")

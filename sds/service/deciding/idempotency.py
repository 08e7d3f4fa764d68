"""Keep the answers under an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): the same key and event get the
first answer again, byte for byte.

A key belongs to one caller at one gate. It is claimed before its event is decided, so that another event under it is refused
even while the first is under way. A lost key loses only the first answer's wording: the event's id ensures one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson
import sqlalchemy as sa

from sds.gate import Gate
from sds.kernel.flow.intake import Event
from sds.kernel.flow.states import answer
from sds.kernel.storage.store import Row
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
_KEY = (_KEPT.caller, _KEPT.gate, _KEPT.key)
_ROW = (_KEPT.fingerprint, _KEPT.event_id, _KEPT.dfid, _KEPT.status, _KEPT.body)


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """One key of one caller at one gate, and its event. `fingerprint`: the record's keyed hash of that event."""

    caller: str
    gate: str
    key: str
    event_id: str
    fingerprint: str

    def values(self, **beside: object) -> dict[str, object]:
        """Return the claim's fields as a statement's values, with those given beside."""
        return {name: getattr(self, name) for name in ("caller", "gate", "key", "event_id", "fingerprint")} | beside


class _Statements:
    """The prepared statements about one key. `own` selects the key's row; `same` does so where it stands for this event."""

    def __init__(self, database: Database) -> None:
        own = sa.and_(*(column == sa.bindparam(column.name) for column in _KEY))
        same = sa.and_(own, *(column == sa.bindparam(column.name) for column in (_KEPT.event_id, _KEPT.fingerprint)))
        names = ("caller", "gate", "key", "event_id", "fingerprint", "made_at_ms")
        answer = ("dfid", "status", "body")
        claim = database.insert(idempotency).values({name: sa.bindparam(name) for name in names})
        keep = database.insert(idempotency).values({name: sa.bindparam(name) for name in (*names, *answer)})
        still_open = sa.and_(
            _KEPT.body.is_(None),
            _KEPT.event_id == keep.excluded.event_id,
            _KEPT.fingerprint == keep.excluded.fingerprint,
        )
        # an answer is kept for `kept_ms` from when it was given, not from the claim
        kept = {name: keep.excluded[name] for name in (*answer, "made_at_ms")}
        self.find = database.prepared(sa.select(*_ROW).where(own))
        self.find_same = database.prepared(sa.select(*_ROW).where(same))
        # where the key is there this update changes nothing, and returns the row
        self.claim = database.prepared(
            claim.on_conflict_do_update(index_elements=_KEY, set_={"key": claim.excluded.key}).returning(*_ROW)
        )
        self.keep = database.prepared(
            keep.on_conflict_do_update(index_elements=_KEY, set_=kept, where=still_open).returning(*_ROW)
        )
        self.release = database.prepared(idempotency.delete().where(same, _KEPT.body.is_(None)))
        self.forget = database.prepared(idempotency.delete().where(own, _KEPT.body == sa.bindparam("body")))


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The first answer under a key: HTTP status, flow, and the body's bytes."""

    status: int
    dfid: str
    body: bytes


class KeptAnswers:
    """The answers that a service keeps, each for `kept_ms`. The methods block, and raise StoreError."""

    def __init__(self, database: Database, *, now_ms: Callable[[], int], kept_ms: int) -> None:
        self._database, self._now_ms, self._kept_ms = database, now_ms, kept_ms
        self._statements, self._swept_at_ms = _Statements(database), 0

    def find(self, claim: KeyClaim, gate: Gate, event: Event) -> KeptAnswer | None:
        """Return the answer under a key; None: there is none. Raises Problem where the key stands for another event.

        An answer is forgotten where its event was erased, or where the record, restored from a backup, lacks the decision.
        """
        rows = self._statements.find(claim.values())
        kept = _checked(rows[0], gate, event) if rows else None
        if kept is None:
            return None
        if gate.store.value(_ERASED, (claim.gate, claim.event_id)) is not None:
            self._forget(claim.gate, [claim.event_id])
            return None
        if kept.status == HTTPStatus.OK and not _is_of(gate, kept):
            self.forget(claim, kept)
            return None
        return kept

    def claim(self, claim: KeyClaim, gate: Gate, event: Event) -> KeptAnswer | None:
        """Claim a key for an event; return the answer under it, if there is one by now. Raises Problem as `find` does."""
        self._sweep_now_and_then()
        (row,) = self._statements.claim(claim.values(made_at_ms=self._now_ms()))
        return _checked(row, gate, event)

    def keep(self, claim: KeyClaim, answer: KeptAnswer) -> KeptAnswer:
        """Keep an answer unless one is kept already; return the one that is kept. Where the key was released meanwhile and
        now stands for another event, nothing is kept and `answer` is returned.
        """
        values = claim.values(made_at_ms=self._now_ms(), status=answer.status, dfid=answer.dfid, body=answer.body)
        rows = self._statements.keep(values) or self._statements.find_same(claim.values())
        return (rows and _answer(rows[0])) or answer

    def release(self, claim: KeyClaim) -> None:
        """Forget a key that has no answer, where it stands for the claim's event."""
        self._statements.release(claim.values())

    def forget(self, claim: KeyClaim, answer: KeptAnswer) -> None:
        """Forget the answer under a key, where it is still this one."""
        self._statements.forget(claim.values(body=answer.body))

    def sweep(self) -> int:
        """Remove up to `SWEPT_MAX` answers that are older than `kept_ms`; return how many."""
        old = sa.select(*_KEY).where(_KEPT.made_at_ms < self._now_ms() - self._kept_ms).limit(SWEPT_MAX)
        with self._database.transaction() as connection:
            return connection.execute(idempotency.delete().where(sa.tuple_(*_KEY).in_(old))).rowcount

    def forget_erased(self, gate: Gate) -> int:
        """Remove the answers about events of a gate whose texts were erased; return how many.

        They are then in no file either, unless somebody was reading meanwhile: then the next call removes them from it.
        """
        name = gate.contract.gate
        erased = gate.store.rows(_ERASED_SINCE, (name, self._now_ms() - self._kept_ms))
        removed = self._forget(name, [event_id for (event_id,) in erased])
        if erased:
            self._database.empty_log()
        return removed

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
    """Return the claim of a caller that sends an event under a key."""
    return KeyClaim(caller, gate.contract.gate, key, event.id, gate.store.keyring.fingerprints(_body(event))[0])


def _checked(row: Row, gate: Gate, event: Event) -> KeptAnswer | None:
    fingerprint, event_id, dfid, _, _ = row
    if not recognises(gate.store, fingerprint, _body(event)):
        raise Problem("KEY_CONFLICT", dfid=dfid or _dfid(gate, event_id))
    return _answer(row)


def _answer(row: Row) -> KeptAnswer | None:
    _, _, dfid, status, body = row
    return None if body is None else KeptAnswer(status, dfid, bytes(body))


def _is_of(gate: Gate, kept: KeptAnswer) -> bool:
    """Tell whether the record has the decision of a kept answer. What became of the decision since does not count."""
    now, said = answer(gate.store, kept.dfid), orjson.loads(kept.body)
    if now is None:
        return False
    decided = _DECIDED if said.get("resolution") == now.resolution else _DECIDED_BY_AGENT
    return all(
        said[name] == getattr(now, name) for name in decided if name in said
    )  # another version may have other fields


def _body(event: Event) -> str:
    return event.original or event.body


def _dfid(gate: Gate, event_id: str) -> str:
    dfid = gate.store.value("SELECT dfid FROM events WHERE gate = ? AND event_id = ?", (gate.contract.gate, event_id))
    return str(dfid or "")

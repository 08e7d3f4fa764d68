"""The tables against the ledger: the entries are folded into what every table must contain, and the two are compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sds.kernel.audit.books import Artifacts, Erasures, Labels, Registry, differences
from sds.kernel.canonical import digest
from sds.kernel.context.rationale import Explanations
from sds.kernel.errors import NOT_AS_WRITTEN, ContractError
from sds.kernel.flow import decision_record
from sds.kernel.flow.undecided import is_named
from sds.kernel.human.decisions import SEALED_HUMAN
from sds.kernel.storage.ledger import READ_AT_ONCE
from sds.kernel.storage.store import Reader, Row
from sds.kernel.storage.vault import fingerprint_in

_OF_ORDERS = frozenset({"ADOPTED", "RESERVED", "SETTLED", "UNKNOWN", "VOIDING", "RESOLVED", "CONTRADICTED"})
_AFTER = {"SUCCESS": "CLOSED", "FAILED": "ABORTED", "UNKNOWN": "EXECUTING"}
_HELD = {"PENDING": "live", "UNKNOWN": "live", "SUCCESS": "settled", "FAILED": "released", "DIRTY": "settled"}
_REVERSAL_AFTER = {
    "": ("PENDING",),
    "PENDING": ("PENDING", "REVERTED", "REFUSED", "UNKNOWN"),  # the second time it is accepted
    "UNKNOWN": ("REVERTED", "REFUSED"),
}
_FOLLOWED = "SELECT parent_dfid, gate, event_id FROM decision_flows WHERE parent_dfid IS NOT NULL"
_TRIGGERS = (
    "SELECT created_at_ms, dfid, gate, event_id, trigger_event FROM decision_flows {after}"
    " ORDER BY created_at_ms, dfid LIMIT ?"
)
_EPOCHS = {"PENDING": 1, "UNKNOWN": 1, "SUCCESS": 2, "FAILED": 2, "DIRTY": 3}


class Tables:
    """One check of one store. Every fault is one line that names the ledger entry or the row."""

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._found: list[str] = []
        self._flows: dict[str, tuple[str, str | None]] = {}  # dfid -> state, tag
        self._orders: dict[str, tuple[str, str | None, int | None]] = {}  # dfid -> status, receipt, executed at
        self._decided: set[str] = set()
        self._differences: set[str] = set()  # cases about the outside's statement, which have no event
        self._adopted: set[str] = set()  # flows made for orders of the outside; their event may come later
        self._ordered_outside: set[str] = set()  # those, and flows of the record whose order was adopted
        self._humans: set[str] = set()  # flows that a human has resolved
        self._attested: set[str] = set()  # flows whose order was settled by a human's word
        self._kept: set[str] = set()  # flows whose draws stay subtracted
        self._sagas: dict[str, tuple[str, str | None]] = {}  # dfid -> phase, compensation
        self._reversals: dict[str, tuple[str, str, str, str | None]] = {}  # dfid -> saga, key, status, reference
        self._registry, self._artifacts, self._explanations = Registry(), Artifacts(), Explanations()
        self._erasures, self._labels = Erasures(), Labels()

    def faults(self, entries: Iterable[tuple[Any, ...]]) -> list[str]:
        for idx, at_ms, kind, dfid, text, _, _ in entries:
            try:
                self._fold(idx, at_ms, kind, dfid, json.loads(text))
            except NOT_AS_WRITTEN:
                self._found.append(f"entry {idx}: not an entry this program writes")
            except ContractError as error:
                self._found.append(f"entry {idx}: {error}")
        self._compare_flows()
        self._compare_events()
        self._found += [*self._registry.faults(self._store), *self._artifacts.faults(self._store)]
        self._compare_reservations()
        self._compare_sagas()
        return self._found

    def _fold(self, idx: int, at_ms: int, kind: str, dfid: str, body: Mapping[str, Any]) -> None:
        """Fold one entry. Raises one of `NOT_AS_WRITTEN` for an entry that this program does not write."""
        books: tuple[Registry | Artifacts | Erasures, ...] = (self._registry, self._artifacts, self._erasures)
        book = next((book for book in books if kind in book.KINDS), None)
        if book is not None:
            book.fold(at_ms, kind, body)
            if kind == "ERASED":
                self._flows[dfid] = self._flows[dfid][0], body["tag"]
        elif kind == "DECIDED":
            self._fold_decision(idx, dfid, body)
        elif kind == "HUMAN":
            self._fold_human(idx, dfid, body)
        elif kind in _OF_ORDERS:
            self._fold_order(idx, at_ms, kind, dfid, body)
        elif kind == "SAGA":
            self._fold_saga(idx, dfid, body)
        elif kind == "REVERSAL":
            self._fold_reversal(dfid, body)
        elif kind in ("RATIONALE", "LABEL") and dfid in self._decided:
            self._fold_later(kind, dfid, body)
        else:
            raise ValueError(kind)

    def _fold_decision(self, idx: int, dfid: str, body: Mapping[str, Any]) -> None:
        self._flows[dfid] = body["state"], body["tag"]
        self._decided.add(dfid)
        if "statement" in body:
            self._differences.add(dfid)
        self._sealed(idx, dfid, decision_record.SEALED, body["rows"])
        self._registry.decided(body)
        self._labels.decided(dfid, body)
        unread = self._artifacts.unknown(body.get("artifacts", ()))
        self._found += [f"entry {idx}: artifact {name} never had this text" for name in unread]
        if dfid in self._sagas:
            self._sagas[dfid] = "ENDED", body["compensation"]

    def _fold_later(self, kind: str, dfid: str, body: Mapping[str, Any]) -> None:
        """Fold what is said of a decision afterwards: why, or whether it was right."""
        if kind == "RATIONALE":
            self._explanations.fold(self._store, dfid, body)
        else:
            self._labels.fold(self._store, dfid, body)
            self._registry.counted(body, "labels")

    def _fold_human(self, idx: int, dfid: str, body: Mapping[str, Any]) -> None:
        if self._flows[dfid][0] != "ESCALATED":
            raise ValueError("not escalated")
        self._flows[dfid] = body["state"], body["tag"]
        self._humans.add(dfid)
        self._sealed(idx, dfid, SEALED_HUMAN, body["rows"])

    def _fold_order(self, idx: int, at_ms: int, kind: str, dfid: str, body: Mapping[str, Any]) -> None:
        if kind == "ADOPTED":
            self._fold_adoption(idx, dfid, body)
        elif kind == "RESERVED":
            self._orders[dfid] = "PENDING", None, None
            self._sealed(idx, dfid, decision_record.RESERVED, body["rows"])
        else:
            self._fold_settlement(at_ms, kind, dfid, body)

    def _fold_adoption(self, idx: int, dfid: str, body: Mapping[str, Any]) -> None:
        if dfid in self._orders or body["status"] not in ("SUCCESS", "FAILED"):
            raise ValueError("ordered already, or no end")
        if dfid not in self._flows:
            self._adopted.add(dfid)
        self._ordered_outside.add(dfid)
        self._orders[dfid] = body["status"], body["reference"] or None, body["at_ms"]
        self._flows[dfid] = body["state"], body["tag"]
        if body["kept"]:
            self._kept.add(dfid)
        self._sealed(idx, dfid, decision_record.ADOPTED_ROWS, body["rows"])

    def _fold_settlement(self, at_ms: int, kind: str, dfid: str, body: Mapping[str, Any]) -> None:
        before = self._orders[dfid][0]
        if kind == "CONTRADICTED":
            if before != "FAILED" and (before != "SUCCESS" or dfid not in self._attested):
                raise ValueError("nothing to contradict")
        elif before not in ("PENDING", "UNKNOWN"):
            raise ValueError("settled already")
        if kind == "VOIDING":  # another entry says what came of it
            return
        if body["status"] not in _HELD:
            raise ValueError("no status")
        self._orders[dfid] = body["status"], body["reference"] or None, at_ms
        state = self._flows[dfid][0] if kind == "CONTRADICTED" else _AFTER[body["status"]]  # a flow that ended stays so
        self._flows[dfid] = state, body["tag"]
        if "by" in body:
            self._attested.add(dfid)
        if body["kept"]:
            self._kept.add(dfid)
        else:
            self._kept.discard(dfid)

    def _fold_saga(self, idx: int, dfid: str, body: Mapping[str, Any]) -> None:
        before = self._sagas.get(dfid, ("", None))[0]
        if (before, body["phase"]) not in (("", "STEPS"), ("STEPS", "DIRTY")):
            raise ValueError("not the next phase")
        self._sagas[dfid] = body["phase"], None
        self._flows[dfid] = "ACTIVE", body.get("tag")
        if not before:
            self._sealed(idx, dfid, decision_record.SAGA, body["rows"])

    def _fold_reversal(self, dfid: str, body: Mapping[str, Any]) -> None:
        before = self._reversals.get(dfid, ("", "", "", None))[2]
        if body["status"] not in _REVERSAL_AFTER[before] or self._orders[dfid][0] not in ("SUCCESS", "DIRTY"):
            raise ValueError("not the next status")
        self._reversals[dfid] = body["saga"], body["idempotency_key"], body["status"], body["reference"] or None

    def _sealed(self, idx: int, dfid: str, tables: Mapping[str, str], seals: Mapping[str, str]) -> None:
        """Compare the rows of a flow with the seals in an entry."""
        if decision_record.CASE_KEY in seals:  # compared at the end, because an erasure may follow
            self._erasures.sealed(dfid, seals[decision_record.CASE_KEY])
        self._found += seal_faults(self._store, idx, dfid, tables, seals)

    def _diff(self, what: str, rows: Iterable[tuple[Any, ...]], expected: Mapping[Any, Any]) -> None:
        self._found += differences(what, rows, expected)

    def _compare_flows(self) -> None:
        states = self._store.rows("SELECT dfid, state, tag FROM decision_flows")
        open_flows = {dfid for dfid, state, _ in states if state == "ACTIVE" and dfid not in self._flows}
        self._diff("flow", ((dfid, (state, tag)) for dfid, state, tag in states if dfid not in open_flows), self._flows)
        orders = self._store.rows("SELECT dfid, status, external_receipt, executed_at_ms FROM execution_log")
        self._diff("execution", ((row[0], row[1:]) for row in orders), self._orders)
        for tables, known in (
            ((*decision_record.SEALED, decision_record.DEADLINE), self._flows.keys() | open_flows),
            (decision_record.RESERVED, self._orders.keys() | self._registry.carried.keys()),
            (SEALED_HUMAN, self._humans),
        ):
            for table in tables:
                rows = self._store.rows(f"SELECT DISTINCT dfid FROM {table}")
                self._found += [
                    f"table {table}: flow {dfid} is not in the ledger" for (dfid,) in rows if dfid not in known
                ]

    def _compare_events(self) -> None:
        """Check that every event points to the last flow of its chain and has the fingerprint in that flow's trigger; or
        that it points to a flow whose order was adopted and whose id the event gives, where the last flow decided nothing.
        """
        superseded = set(self._store.rows(_FOLLOWED))  # a saga's children have other events than the saga
        apart = self._differences | self._adopted
        wanted: dict[str, tuple[str, str]] = {}
        cases: dict[str, tuple[str, bool]] = {}
        for _, dfid, gate, event_id, trigger in self._triggers():
            name, fingerprint = f"{gate}/{event_id}", _fingerprint(trigger)
            cases[dfid] = name, fingerprint is not None
            if (dfid, gate, event_id) not in superseded and dfid not in apart:
                if name in wanted:
                    self._found.append(f"event {name}: flows {wanted[name][1]} and {dfid} both claim to be its last")
                wanted[name] = (fingerprint or _digest(trigger), dfid)
        rows = self._store.rows("SELECT gate, event_id, body_hash, dfid FROM events")
        for gate, event_id, body_hash, dfid in rows:
            _, last = wanted.get(f"{gate}/{event_id}", ("", ""))
            free = not last or self._flows.get(last, ("",))[0] == "ABORTED"
            if free and dfid in self._ordered_outside and is_named(dfid, gate, event_id, body_hash):
                wanted[f"{gate}/{event_id}"] = body_hash, dfid
        self._diff("event", ((f"{row[0]}/{row[1]}", row[2:]) for row in rows), wanted)
        self._found += self._erasures.faults(self._store, cases)

    def _triggers(self) -> Iterator[Row]:
        """Yield (opened, dfid, gate, event, trigger) of all flows, READ_AT_ONCE in memory at a time."""
        rows = self._store.rows(_TRIGGERS.format(after=""), (READ_AT_ONCE,))
        while rows:
            yield from rows
            following = _TRIGGERS.format(after="WHERE (created_at_ms, dfid) > (?, ?)")
            rows = self._store.rows(following, (*rows[-1][:2], READ_AT_ONCE))

    def _compare_reservations(self) -> None:
        """Recompute every counter from the reservations that the ledger says are held, settled or given back."""
        drawn: Counter[str] = Counter()
        epochs: Counter[str] = Counter()
        used: Counter[str] = Counter()
        for dfid, name, amount, status in self._store.rows("SELECT dfid, resource, amount, status FROM reservations"):
            order, reverted = self._orders.get(dfid, ("",))[0], self._reverted(dfid)
            if ("released" if reverted else _HELD.get(order)) != status:
                self._found.append(f"reservation of flow {dfid}: the table says {status}")
            epochs[name] += _EPOCHS.get(order, 0) + reverted
            drawn[name] += amount if status == "live" or (status == "settled" and dfid in self._kept) else 0
        for dfid, name, amount in self._store.rows("SELECT dfid, scope, amount FROM spend"):
            used[name] += amount if self._orders.get(dfid, ("",))[0] != "FAILED" and not self._reverted(dfid) else 0
        resources = self._store.rows("SELECT resource, epoch, drawn FROM resources")
        self._diff("resource", ((n, (e, d)) for n, e, d in resources), {n: (epochs[n], drawn[n]) for n in epochs})
        self._diff("spend", self._store.rows("SELECT scope, used FROM spend_totals"), used)

    def _reverted(self, dfid: str) -> bool:
        return self._reversals.get(dfid, ("", "", ""))[2] == "REVERTED"

    def _compare_sagas(self) -> None:
        sagas = self._store.rows("SELECT dfid, phase, compensation FROM sagas")
        self._diff("saga", ((row[0], row[1:]) for row in sagas), self._sagas)
        reversals = self._store.rows("SELECT dfid, saga, idempotency_key, status, reference FROM saga_reversals")
        self._diff("reversal", ((row[0], row[1:]) for row in reversals), self._reversals)


def seal_faults(store: Reader, idx: int, dfid: str, tables: Mapping[str, str], seals: Mapping[str, str]) -> list[str]:
    """Return which rows of a flow differ from the seals in the entry `idx`, all but the key of its case."""
    now = decision_record.seal(store, dfid, tables)
    return [
        f"entry {idx}: table {name} of flow {dfid} differs from its seal"
        for name in (*tables, decision_record.DEADLINE)
        if now.get(name) != seals.get(name)
    ]


def _fingerprint(trigger: str) -> str | None:
    """Return the fingerprint in a trigger; None for a trigger in clear, or one that was altered beyond reading."""
    try:
        return fingerprint_in(trigger)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _digest(text: str) -> str:
    try:
        return digest(text)
    except TypeError:
        return "not text"

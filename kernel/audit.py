"""Checking the record: the ledger against itself, the tables against the ledger, and one flow read back whole.

What this cannot see without a head kept elsewhere: that the newest entries were cut off, or that everything was
written anew from the start by someone who computes the hashes, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel import ledger, record
from sds.kernel.canonical import digest
from sds.kernel.ledger import Head
from sds.kernel.store import Store

FAULTS_MAX = 100
_AFTER = {"SUCCESS": "CLOSED", "FAILED": "ABORTED", "UNKNOWN": "EXECUTING"}


@dataclass(frozen=True, slots=True)
class Report:
    """`faults` is empty when all is well. `blind` says what this check could not have seen."""

    head: Head
    entries: int
    faults: tuple[str, ...]
    blind: str | None


def verify(store: Store, expected: Head | None = None) -> Report:
    """Verify chain, tables and, when `expected` is given, that the ledger still contains that head."""
    faults = [f"database: {line[0]}" for line in store.rows("PRAGMA integrity_check") if line[0] != "ok"]
    entries = store.rows("SELECT idx, at_ms, kind, dfid, body, prev_hash, entry_hash FROM ledger ORDER BY idx")
    chain, head = ledger.verify_chain(entries)
    faults += chain
    if expected is not None:
        faults += _against_head(store, expected, head)
    if not chain:
        faults += _Tables(store).faults(entries)
    blind = None if expected else "without --head: entries cut off at the end, or a ledger rewritten as a whole"
    return Report(head, len(entries), tuple(faults[:FAULTS_MAX]), blind)


def _against_head(store: Store, expected: Head, head: Head) -> list[str]:
    if expected.idx > head.idx:
        return [f"entry {head.idx + 1}: missing (the ledger ends at {head.idx}, the head kept says {expected.idx})"]
    stored = store.value("SELECT entry_hash FROM ledger WHERE idx = ?", (expected.idx,))
    at_genesis = expected.idx == 0 and expected.entry_hash == ledger.GENESIS
    return (
        [] if at_genesis or stored == expected.entry_hash else [f"entry {expected.idx}: not the entry the head names"]
    )


class _Tables:
    """Folds the ledger into what the tables must say, and compares."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.found: list[str] = []
        self.states: dict[str, str] = {}
        self.executions: dict[str, str] = {}
        self.receipts: dict[str, str] = {}
        self.agents: dict[str, str] = {}
        self.contracts: dict[str, str] = {}
        self.halted = False

    def faults(self, entries: list[tuple[Any, ...]]) -> list[str]:
        for idx, _, kind, dfid, text, _, _ in entries:
            try:
                self._fold(idx, kind, dfid, json.loads(text))
            except (KeyError, TypeError, ValueError):
                self.found.append(f"entry {idx}: not an entry this program writes")
        self._compare()
        return self.found

    def _fold(self, idx: int, kind: str, dfid: str, body: Mapping[str, Any]) -> None:
        if kind == "DECIDED":
            self.states[dfid] = body["state"]
            self._sealed(idx, dfid, record.SEALED, body["rows"])
        elif kind == "RESERVED":
            self.executions[dfid] = "PENDING"
            self._sealed(idx, dfid, record.RESERVED, body["rows"])
        elif kind in ("SETTLED", "UNKNOWN", "RESOLVED"):
            self.executions[dfid], self.states[dfid] = body["status"], _AFTER[body["status"]]
            self.receipts[dfid] = body["reference"]
        elif kind == "AGENT":
            self.agents[body["agent_id"]] = body["status"]
        elif kind == "CONTRACT":
            self.contracts[body["agent_id"]] = body["hash"]
            self.agents.setdefault(body["agent_id"], "ACTIVE")
        elif kind in ("HALT", "RESUME"):
            self.halted = kind == "HALT"
        else:
            raise ValueError(kind)

    def _sealed(self, idx: int, dfid: str, tables: Mapping[str, str], seals: Mapping[str, str]) -> None:
        now = record.seal(self.store, dfid, tables)
        self.found += [
            f"entry {idx}: table {name} of flow {dfid} differs" for name in tables if now[name] != seals[name]
        ]

    def _compare(self) -> None:
        self._same(
            "flow", "SELECT dfid, state FROM decision_flows WHERE state NOT IN ('ACTIVE', 'CREATED')", self.states
        )
        self._same("execution", "SELECT dfid, status FROM execution_log", self.executions)
        receipts = {dfid: ref for dfid, ref in self.receipts.items() if ref}
        self._same(
            "receipt", "SELECT dfid, external_receipt FROM execution_log WHERE external_receipt IS NOT NULL", receipts
        )
        self._same("agent", "SELECT agent_id, status FROM agents", self.agents)
        self._same("contract of", "SELECT agent_id, contract_hash FROM agents", self.contracts)
        for name, body in self.store.rows("SELECT hash, body FROM contracts"):
            if digest(json.loads(body)) != name:
                self.found.append(f"contract {name}: its text does not match its hash")
        if self.store.halted != self.halted:
            self.found.append("halted: the table and the ledger differ")
        self._reservations()
        for table in (*record.SEALED, *record.RESERVED):
            for (dfid,) in self.store.rows(f"SELECT DISTINCT dfid FROM {table}"):
                if dfid not in self.states and not self._active(dfid):
                    self.found.append(f"table {table}: flow {dfid} is not in the ledger")

    def _active(self, dfid: str) -> bool:
        return bool(self.store.value("SELECT state FROM decision_flows WHERE dfid = ?", (dfid,)) == "ACTIVE")

    def _same(self, what: str, sql: str, expected: Mapping[str, str]) -> None:
        now: dict[str, str] = dict(self.store.rows(sql))
        for name in sorted({*now, *expected}):
            if now.get(name) != expected.get(name):
                self.found.append(f"{what} {name}: the table says {now.get(name)}, the ledger {expected.get(name)}")

    def _reservations(self) -> None:
        """Recompute every counter from the reservations that the ledger says are held, settled or given back."""
        drawn: Counter[str] = Counter()
        used: Counter[str] = Counter()
        held = {"PENDING": "live", "UNKNOWN": "live", "SUCCESS": "settled", "FAILED": "released"}
        kept = {
            g
            for g, b in self.store.rows("SELECT gate, body FROM contracts")
            if json.loads(b)["draws_settle_in"] == "kernel"
        }
        gates: dict[str, str] = dict(self.store.rows("SELECT dfid, gate FROM decision_flows"))
        for dfid, name, amount, status in self.store.rows("SELECT dfid, resource, amount, status FROM reservations"):
            if held.get(self.executions.get(dfid, "")) != status:
                self.found.append(f"reservation of flow {dfid}: the table says {status}")
            if status == "live" or (status == "settled" and gates.get(dfid) in kept):
                drawn[name] += amount
        for dfid, name, amount in self.store.rows("SELECT dfid, scope, amount FROM spend"):
            used[name] += amount if self.executions.get(dfid) != "FAILED" else 0
        for what, sql, wanted in (
            ("resource", "SELECT resource, drawn FROM resources", drawn),
            ("spend", "SELECT scope, used FROM spend_totals", used),
        ):
            now: dict[str, int] = dict(self.store.rows(sql))
            self.found += [f"{what} {n}: the counter is wrong" for n in {*now, *wanted} if now.get(n, 0) != wanted[n]]


def flow_record(store: Store, dfid: str) -> dict[str, Any] | None:
    """Return everything the record holds of one flow: the causal chain of DIR 4.2, ledger entries included."""
    flow = _one(store, "decision_flows", dfid)
    if flow is None:
        return None
    tables = ("context_snapshots", "policy_proposals", "dim_validations", "execution_log")
    return {
        "decision_flows": flow,
        **{table: _one(store, table, dfid) for table in tables},
        "attempts": _many(store, "attempts", dfid),
        "reservations": _many(store, "reservations", dfid),
        "ledger": _many(store, "ledger", dfid),
    }


def _many(store: Store, table: str, dfid: str) -> list[dict[str, Any]]:
    columns = [row[1] for row in store.rows(f"PRAGMA table_info({table})")]
    rows = store.rows(f"SELECT * FROM {table} WHERE dfid = ?", (dfid,))
    return [{c: _text(v) for c, v in zip(columns, row, strict=True)} for row in rows]


def _one(store: Store, table: str, dfid: str) -> dict[str, Any] | None:
    found = _many(store, table, dfid)
    return found[0] if found else None


def _text(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value

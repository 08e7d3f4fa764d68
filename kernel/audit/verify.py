"""Checks the record: the ledger against itself, and the tables against the ledger. Reads one flow back whole.

What this cannot see: without a head kept elsewhere, that the newest entries were cut off; without public keys, that
somebody wrote everything anew from the start and computed the hashes, too. Never sealed are open flows, and the count of an
agent's rejections in a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.audit.tables import Tables
from sds.kernel.canonical import canonical, one_line
from sds.kernel.errors import NOT_AS_WRITTEN, StoreError, reading, unreadable
from sds.kernel.flow.states import answer
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import Checkpoint, Head, PublicKeys
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import ATTEMPT, PROPOSAL, TRIGGER, Texts

FAULTS_MAX = 100
FAULT_CHARS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Report:
    """`faults` is empty when all is well. `blind`: what this check could not have seen. `signed`: the entry of the newest
    checkpoint, None without one.

    `notes`: what is intact and yet worth a look. That a clock was set back is no fault: the ledger says truly what the
    clock said, and no entry can be mended afterwards.
    """

    head: Head
    entries: int
    faults: tuple[str, ...]
    blind: str | None
    signed: int | None = None
    notes: tuple[str, ...] = ()


def verify(store: Store, expected: Head | Checkpoint | None = None, public: PublicKeys | None = None) -> Report:
    """Verify chain, tables and checkpoints and, when `expected` is given, that the ledger still contains that head.

    `public`: the keys that must have signed the checkpoints. It reads one moment of the record, while others write.
    """
    faults: list[str] = []
    walk = _Walk()
    signed: list[Checkpoint] = []
    stepped: list[ledger.Step] = []
    head = Head(0, ledger.GENESIS)
    with store.frozen() as reader:
        try:
            faults += _database(reader)
            signed = ledger.read_checkpoints(reader)
            walk.wanted |= {each.idx for each in (*signed, expected, public and public.since) if each}
            chain, head = ledger.verify_chain(walk.noted(ledger.entries(reader)))
            faults += chain
            faults += ledger.checkpoint_faults(signed, walk.hashes, head, public)
            if expected is not None:
                faults += _against_head(walk.hashes, expected, head, public)
            if not chain:
                stepped += ledger.steps_of(ledger.entries(reader))
                faults += [*Tables(reader).faults(ledger.entries(reader)), *ledger.clock_faults(reader, stepped)]
        except StoreError as error:
            faults.append(f"database: {error}")
        except NOT_AS_WRITTEN as error:  # a column has another type than its table declares
            faults.append(f"database: the rows cannot be compared: {one_line(error, 200)}")
    shown = tuple(one_line(fault, FAULT_CHARS_MAX) for fault in faults[:FAULTS_MAX])
    last = signed[-1].idx if signed else None
    blind = None if expected else _blind(head, last, public)
    notes = tuple(str(step) for step in stepped[:FAULTS_MAX])
    return Report(head, walk.entries, shown, blind, last, notes)


class _Walk:
    """What is kept from one walk through a ledger: the number of entries, and the hashes of those in `wanted`, by index."""

    def __init__(self) -> None:
        self.wanted = set[int]()
        self.entries, self.hashes = 0, dict[int, str]()

    def noted(self, entries: Iterable[Row]) -> Iterator[Row]:
        for entry in entries:
            self.entries += 1
            if entry[0] in self.wanted:
                self.hashes[entry[0]] = entry[6]
            yield entry


def _blind(head: Head, signed: int | None, public: PublicKeys | None) -> str:
    """Return what cannot be seen without a head kept elsewhere."""
    if public is None:
        return "without --head or --public-key: entries cut off at the end, or a ledger rewritten as a whole"
    last = public.since.idx if signed is None else signed
    others = f", or others in the place of the {head.idx - last} after entry {last}" if head.idx > last else ""
    return f"without --head: entries cut off at the end{others}"


def _database(reader: Reader) -> list[str]:
    now, wanted = reader.schema, reader.expected_schema
    return [
        *(f"database: {line}" for line in reader.damage()),
        *(f"schema: `{name}` was altered" for name in sorted(wanted) if now.get(name) != wanted[name]),
        *(f"schema: `{name}` does not belong here" for name in sorted(now.keys() - wanted.keys())),
    ]


def _against_head(
    hashes: Mapping[int, str], expected: Head | Checkpoint, head: Head, public: PublicKeys | None
) -> list[str]:
    """Return how the ledger differs from a head that was kept elsewhere."""
    if isinstance(expected, Checkpoint) and (wrong := ledger.forged(expected, "the given head", public)):
        return [wrong]
    if expected.idx > head.idx:
        return [f"entry {head.idx + 1}: missing (the ledger ends at {head.idx}, the given head is at {expected.idx})"]
    stored = hashes.get(expected.idx, ledger.GENESIS)
    return [] if stored == expected.entry_hash else [f"entry {expected.idx}: not the entry that the given head names"]


def flow_record(store: Store, dfid: str) -> dict[str, Any] | None:
    """Return everything the record holds of one flow: the causal chain of DIR 4.2, with its ledger entries.

    Texts are in clear. In an erased case each is `[erased]`, in a record without the kernel's key `[sealed]`. Raises
    StoreError when the rows cannot be read.
    """
    with reading(unreadable(dfid)):
        flow = _one(store, "decision_flows", dfid)
        if flow is None:
            return None
        tables = ("context_snapshots", "policy_proposals", "dim_validations", "human_decisions", "execution_log")
        return {
            "decision_flows": flow,
            **{table: _one(store, table, dfid) for table in tables},
            "attempts": _many(store, "attempts", dfid),
            "rationale": _rationale(store, dfid),
            "reservations": _many(store, "reservations", dfid),
            "saga": _one(store, "sagas", dfid),
            "children": _children(store, dfid, flow["event_id"]),
            "reversals": _many(store, "saga_reversals", dfid) or _many(store, "saga_reversals", dfid, by="saga"),
            "ledger": _many(store, "ledger", dfid),
        }


def _children(store: Reader, dfid: str, event_id: str) -> list[dict[str, Any]]:
    """Return the flows that were opened for this one, each by its latest attempt. A restart is no child."""
    rows = store.rows(
        "SELECT e.dfid FROM decision_flows f JOIN events e ON e.gate = f.gate AND e.event_id = f.event_id"
        " LEFT JOIN ledger l ON l.dfid = f.dfid WHERE f.parent_dfid = ? AND f.event_id <> ?"
        " GROUP BY e.dfid ORDER BY MIN(f.created_at_ms), MIN(l.idx) IS NULL, MIN(l.idx), e.dfid",
        (dfid, event_id),
    )
    found = (answer(store, row[0]) for row in rows)
    names = ("dfid", "event_id", "state", "tag", "action", "params", "execution", "reference")
    return [{name: getattr(child, name) for name in names} for child in found if child is not None]


def _rationale(store: Reader, dfid: str) -> str | None:
    """Return the rationale that was written after the decision; None: there is none."""
    entry = store.value("SELECT body FROM ledger WHERE dfid = ? AND kind = 'RATIONALE'", (dfid,))
    return None if entry is None else Texts(store, dfid, shown=True).rationale(json.loads(entry))


def _many(store: Reader, table: str, dfid: str, *, by: str = "dfid") -> list[dict[str, Any]]:
    columns = store.columns(table)
    rows = store.rows(f"SELECT * FROM {table} WHERE {by} = ? ORDER BY 1, 2", (dfid,))
    texts = Texts(store, dfid, shown=True)
    return [_in_clear(texts, table, dict(zip(columns, row, strict=True))) for row in rows]


def _in_clear(texts: Texts, table: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its texts opened and its bytes decoded."""
    if table == "decision_flows":
        row["trigger_event"] = canonical(texts.fields(TRIGGER, json.loads(row["trigger_event"]))).decode()
    elif table == "context_snapshots":
        row["prompt"] = canonical(texts.prompt(row["prompt"])).decode()
    elif table == "policy_proposals":
        if row["justification"] is not None:
            row["justification"] = texts.justification(row["justification"], row["proposal"])
        row["proposal"] = texts.data(PROPOSAL, row["proposal"])
    elif table == "attempts":
        row["proposal"] = texts.data(ATTEMPT, row["proposal"])
    return {name: _text(value) for name, value in row.items()}


def _one(store: Reader, table: str, dfid: str) -> dict[str, Any] | None:
    found = _many(store, table, dfid)
    return found[0] if found else None


def _text(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value

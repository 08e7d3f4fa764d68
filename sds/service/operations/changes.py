"""Read the changes at a gate from its ledger, which is the outbox of the event stream and of the webhooks.

An entry is committed in the transaction of the change it records, and indices follow the order of commits: a reader that
has read up to an index has missed no entry. A change holds codes and ids, never texts: values with spaces are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.host.clock import when
from sds.kernel.errors import StoreError, reading
from sds.kernel.flow.states import FINAL, UNDECIDED_TAGS
from sds.kernel.storage.store import Reader

PAGE_MAX = 200  # entries read at once

_SHOWN = ("outcome", "action", "tag", "reason_code", "status", "agent_id", "was", "decision", "impact")
_CODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
_STATED = frozenset({"DECIDED", "HUMAN", "ADOPTED"})  # kinds of entry that name the flow's state
_SETTLED = frozenset({"SETTLED", "RESOLVED"})


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a gate's ledger. `idx`: its index; `state`: the flow's new state, None where it stays."""

    gate: str
    idx: int
    at_ms: int
    kind: str
    dfid: str
    entry_hash: str
    state: str | None
    facts: Mapping[str, str]

    @property
    def final(self) -> str:
        """The final state that this entry brings: a state of `FINAL`, UNKNOWN or CONTRADICTED; "" where it brings none."""
        if self.kind in ("UNKNOWN", "CONTRADICTED"):
            return self.kind
        return self.state if self.kind in _STATED | _SETTLED and self.state in FINAL else ""

    @property
    def retryable(self) -> bool:
        """Whether the flow ended undecided, so that its event may be sent again."""
        return self.state == "ABORTED" and self.facts.get("tag") in UNDECIDED_TAGS

    def as_data(self) -> dict[str, Any]:
        facts = {"gate": self.gate, "entry": self.idx, "at": when(self.at_ms), "kind": self.kind}
        facts |= {"dfid": self.dfid} if self.dfid else {}
        facts |= {"state": self.state} if self.state else {}
        return facts | dict(self.facts)


def read_changes(record: Reader, gate: str, after: int, limit: int = PAGE_MAX) -> list[Change]:
    """Return up to `limit` entries after an index, in order, at most `PAGE_MAX`. Raises StoreError."""
    rows = record.rows(
        "SELECT idx, at_ms, kind, dfid, body, entry_hash FROM ledger WHERE idx > ? ORDER BY idx LIMIT ?",
        (after, min(limit, PAGE_MAX)),
    )
    with reading(StoreError(f"the ledger of gate `{gate}` cannot be read", hint="sds ledger verify")):
        return [_change(gate, *row) for row in rows]


def _change(gate: str, idx: int, at_ms: int, kind: str, dfid: str, text: str, entry_hash: str) -> Change:
    body = json.loads(text)
    facts = {name: value for name in _SHOWN if isinstance(value := body.get(name), str) and _CODE.fullmatch(value)}
    state = _state(kind, body)
    return Change(gate, idx, at_ms, kind, dfid, entry_hash, state, facts)


def _state(kind: str, body: Mapping[str, Any]) -> str | None:
    """Return a flow's state after an entry; None where the entry does not change it."""
    if kind in _STATED:
        return str(body["state"])
    if kind in _SETTLED:
        return "CLOSED" if body["status"] == "SUCCESS" else "ABORTED"
    return "EXECUTING" if kind == "UNKNOWN" else None


def entries_behind(record: Reader, gate: str, idx: int) -> Iterator[Change]:
    """Yield the entries after an index. They are read a page at a time. Raises StoreError."""
    while page := read_changes(record, gate, idx):
        yield from page
        idx = page[-1].idx


def final_changes(record: Reader, gate: str, idx: int) -> Iterator[Change]:
    """Yield the changes after an index that bring a final state. Raises StoreError."""
    return (change for change in entries_behind(record, gate, idx) if change.final)


def head(record: Reader) -> int:
    """Return the index of the ledger's last entry; 0 where there is none."""
    return int(record.value("SELECT MAX(idx) FROM ledger") or 0)


def parse_positions(text: str) -> dict[str, int]:
    """Return positions by gate, read from `fraud:33,refund:120`. Raises ValueError."""
    parsed = dict[str, int]()
    for part in text.split(","):
        gate, _, idx = part.strip().partition(":")
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", gate) or not re.fullmatch(r"[0-9]{1,18}", idx) or gate in parsed:
            raise ValueError("not positions")
        parsed[gate] = int(idx)
    return parsed


def write_positions(positions: Mapping[str, int]) -> str:
    """Return positions as the id of a server-sent event: `fraud:33,refund:120`."""
    return ",".join(f"{gate}:{idx}" for gate, idx in sorted(positions.items()))

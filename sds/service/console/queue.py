"""The queue: what waits for a human at every gate that somebody may review, as links sort and filter it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from sds.gate import Gate
from sds.kernel.contract.human_terms import Impact, human_contract
from sds.kernel.human import cases
from sds.kernel.human.cases import Case
from sds.service.console import words
from sds.service.console.case import numbers
from sds.service.console.taken import Taken

READ_MAX = 1_000  # cases of one gate that are looked through, oldest first
PAGE = 50  # rows of a page

TEXT_CHARS_MAX = 200
_PAGE = re.compile(r"[1-9][0-9]{0,5}")

Sort = Literal["age", "impact", "reason"]
_SORTS: dict[str, Sort] = {"age": "age", "impact": "impact", "reason": "reason"}
_IMPACTS: dict[Impact | None, str] = {"HIGH": "1", "LOW": "2", None: "3"}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One case that waits. `proposed`: in words, empty where nothing is; `taken`: by whom, if by anybody."""

    gate: str
    dfid: str
    event_id: str
    since_ms: int
    reason: str
    proposed: str
    impact: Impact | None
    damaged: bool
    taken: Taken | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a link of the queue asks for. Empty: all of it. `page` counts from 1."""

    sort: Sort = "age"
    gate: str = ""
    impact: str = ""
    reason: str = ""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Wanted:
        """Read a query; what it asks for that there is not is left out, for a link may be an old one."""
        sort = _SORTS.get(query.get("sort", ""), "age")
        gate, impact, reason = (query.get(name, "")[:TEXT_CHARS_MAX] for name in ("gate", "impact", "reason"))
        page = query.get("page", "")
        return cls(sort, gate, impact, reason, int(page) if _PAGE.fullmatch(page) else 1)

    def link(self, **changes: object) -> str:
        """Return the query of a link that changes this; a filter that is changed begins at the first page."""
        whole = {"sort": self.sort, "gate": self.gate, "impact": self.impact, "reason": self.reason, "page": 1}
        asked = {name: value for name, value in (whole | changes).items() if value not in ("", "age", 1, 0)}
        return f"?{urlencode(asked)}" if asked else "?"


@dataclass(frozen=True, slots=True)
class Queue:
    """What is shown. `found`: rows that the filters leave; `waiting`: all that wait, `more` where only the oldest of them
    were looked through. `gates`, `impacts`, `reasons`: what there is to filter by, with how many each.
    """

    rows: tuple[QueueRow, ...]
    found: int
    waiting: int
    more: bool
    gates: Mapping[str, int]
    impacts: Mapping[str, int]
    reasons: Mapping[str, int]
    page: int
    pages: int


def waiting(name: str, gate: Gate, currency: str, taken: Mapping[str, Taken]) -> list[QueueRow]:
    """Return what waits at one gate, oldest first. `taken`: by flow."""
    terms = human_contract(gate.contract)
    found = cases.waiting(gate.store, terms, limit=READ_MAX + 1)
    return [
        QueueRow(
            gate=name,
            dfid=case.dfid,
            event_id=words.plain(case.event_id),
            since_ms=case.since_ms,
            reason=_reason(case),
            proposed=" ".join([case.action, *(text for _, text in numbers(terms, case.action, case.numbers, currency))])
            if case.action
            else "",
            impact=case.impact(terms),
            damaged=case.damaged,
            taken=taken.get(case.dfid),
        )
        for case in found
    ]


def _reason(case: Case) -> str:
    return "RECORD_DAMAGED" if case.damaged else "UNKNOWN" if case.unknown else case.reason_code or ""


def queue(found: Sequence[QueueRow], wanted: Wanted) -> Queue:
    """Filter, sort and cut what waits."""
    rows = [row for row in found if _fits(row, wanted)]
    rows.sort(key=lambda row: (_first(row, wanted.sort), row.since_ms, row.dfid))
    pages = max(1, -(-len(rows) // PAGE))
    page = min(wanted.page, pages)
    by_gate = _counts(row.gate for row in found)
    return Queue(
        rows=tuple(rows[(page - 1) * PAGE : page * PAGE]),
        found=len(rows),
        waiting=len(found),
        more=any(count > READ_MAX for count in by_gate.values()),
        gates=by_gate,
        impacts=_counts(row.impact or "none" for row in found),
        reasons=_counts(row.reason for row in found),
        page=page,
        pages=pages,
    )


def _first(row: QueueRow, sort: Sort) -> str:
    """Return what comes before age in an order."""
    return {"age": "", "impact": _IMPACTS[row.impact], "reason": row.reason}[sort]


def _fits(row: QueueRow, wanted: Wanted) -> bool:
    return all(
        not asked or asked == has
        for asked, has in ((wanted.gate, row.gate), (wanted.impact, row.impact or "none"), (wanted.reason, row.reason))
    )


def _counts(values: Iterable[str]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for value in values:
        counted[value] = counted.get(value, 0) + 1
    return dict(sorted(counted.items()))

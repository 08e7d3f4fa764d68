"""The queue page: the cases that wait for a human at the gates a reviewer may see, sorted, filtered and paged by links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal
from urllib.parse import urlencode

from sds.gate import Gate
from sds.kernel.contract.human_terms import Impact, human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.human import cases
from sds.kernel.human.cases import Case
from sds.service.console import words
from sds.service.console.case import leaning, numbers
from sds.service.console.taken import Taken

READ_MAX = 500  # waiting cases of one gate that are read, oldest first
PAGE = 50  # rows on a page

TEXT_CHARS_MAX = 200
_PAGE = re.compile(r"[1-9][0-9]{0,5}")

Sort = Literal["age", "impact", "reason"]
_SORTS: dict[str, Sort] = {"age": "age", "impact": "impact", "reason": "reason"}
_IMPACTS: dict[Impact | None, str] = {"HIGH": "1", "LOW": "2", None: "3"}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One waiting case. `proposed`: the proposal in words, "" where there is none; `leaning`: then the agent's likeliest
    decision, where that was measured; `taken`: who has taken the case.
    """

    gate: str
    dfid: str
    event_id: str
    since_ms: int
    reason: str
    proposed: str
    leaning: str
    impact: Impact | None
    damaged: bool
    taken: Taken | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a link of the queue asks for. An empty filter lets all cases pass. `page` counts from 1."""

    sort: Sort = "age"
    gate: str = ""
    impact: str = ""
    reason: str = ""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Wanted:
        """Read a query. Invalid values count as not given, since a link may be an old one."""
        sort = _SORTS.get(query.get("sort", ""), "age")
        gate, impact, reason = (query.get(name, "")[:TEXT_CHARS_MAX] for name in ("gate", "impact", "reason"))
        page = query.get("page", "")
        return cls(sort, gate, impact, reason, int(page) if _PAGE.fullmatch(page) else 1)

    def link(self, **changes: object) -> str:
        """Return the query of a link with these changes. It leads to the first page unless `page` is given."""
        whole = {"sort": self.sort, "gate": self.gate, "impact": self.impact, "reason": self.reason, "page": 1}
        asked = {name: value for name, value in (whole | changes).items() if value not in ("", "age", 1, 0)}
        return f"?{urlencode(asked)}" if asked else "?"


@dataclass(frozen=True, slots=True)
class Queue:
    """The content of a page. `found`: number of rows after filtering; `waiting`: number of cases read; `more`: whether a gate
    has more than `READ_MAX`. `gates`, `impacts`, `reasons`: the values to filter by, with the number of cases of each.
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
    """Return the rows of one gate, oldest first. `taken`: by dfid. Raises StoreError."""
    terms = human_contract(gate.contract)
    found = cases.waiting(gate.store, terms, limit=READ_MAX + 1)
    return [
        QueueRow(
            gate=name,
            dfid=case.dfid,
            event_id=words.plain(case.event_id),
            since_ms=case.since_ms,
            reason=_reason(case),
            proposed=_proposed(terms, case, currency),
            leaning="" if case.damaged else leaning(case, gate.contract, currency),
            impact=case.impact(terms),
            damaged=case.damaged,
            taken=taken.get(case.dfid),
        )
        for case in found
    ]


def _proposed(terms: Contract, case: Case, currency: str) -> str:
    action = case.action
    return " ".join((action, *(text for _, text in numbers(terms, action, case.numbers, currency)))) if action else ""


def _reason(case: Case) -> str:
    return "RECORD_DAMAGED" if case.damaged else "UNKNOWN" if case.unknown else case.reason_code or ""


def queue(waiting: Sequence[QueueRow], wanted: Wanted) -> Queue:
    """Return one page of rows, filtered and sorted. `waiting`: of each gate at most one row more than are listed."""
    more = any(count > READ_MAX for count in Counter(row.gate for row in waiting).values())
    waiting = [row for _, rows in groupby(waiting, lambda row: row.gate) for row in islice(rows, READ_MAX)]
    rows = [row for row in waiting if _fits(row, wanted)]
    rows.sort(key=lambda row: (_sort_key(row, wanted.sort), row.since_ms, row.dfid))
    pages = max(1, -(-len(rows) // PAGE))
    page = min(wanted.page, pages)
    by_gate = _counts(row.gate for row in waiting)
    return Queue(
        rows=tuple(rows[(page - 1) * PAGE : page * PAGE]),
        found=len(rows),
        waiting=len(waiting),
        more=more,
        gates=by_gate,
        impacts=_counts(row.impact or "none" for row in waiting),
        reasons=_counts(row.reason for row in waiting),
        page=page,
        pages=pages,
    )


def _sort_key(row: QueueRow, sort: Sort) -> str:
    """Return the sort key that comes before age."""
    return {"age": "", "impact": _IMPACTS[row.impact], "reason": row.reason}[sort]


def _fits(row: QueueRow, wanted: Wanted) -> bool:
    return all(
        not asked or asked == has
        for asked, has in ((wanted.gate, row.gate), (wanted.impact, row.impact or "none"), (wanted.reason, row.reason))
    )


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))

"""The queue page: the cases that wait for a human at the gates a reviewer may see, sorted, filtered and paged by links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal
from urllib.parse import urlencode

from sds.gate import Gate
from sds.kernel.contract.human_terms import Impact, human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.human import cases
from sds.kernel.human.cases import WAITING_MAX, Case, CaseHead
from sds.service.console import words
from sds.service.console.case import leaning, numbers
from sds.service.console.taken import Taken

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
class Waiting:
    """A waiting case before its page is known: its head, and the impact of what is proposed."""

    gate: str
    head: CaseHead
    impact: Impact | None


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
        whole: dict[str, object] = {
            "sort": self.sort,
            "gate": self.gate,
            "impact": self.impact,
            "reason": self.reason,
            "page": 1,
        }
        asked = {name: value for name, value in (whole | changes).items() if value not in ("", "age", 1, 0)}
        return f"?{urlencode(asked)}" if asked else "?"

    @property
    def query(self) -> str:
        """The query that asks for the same page, which links from the queue carry along; "" where it is the whole queue."""
        asked = self.link(page=self.page)
        return asked if asked != "?" else ""


@dataclass(frozen=True, slots=True)
class Queue:
    """The cases of a page. `found`: number of cases after filtering; `waiting`: number of cases; `more`: whether a gate has
    more than `WAITING_MAX`. `gates`, `impacts`, `reasons`: the values to filter by, with the number of cases of each.
    """

    cases: tuple[Waiting, ...]
    found: int
    waiting: int
    more: bool
    gates: Mapping[str, int]
    impacts: Mapping[str, int]
    reasons: Mapping[str, int]
    page: int
    pages: int


def waiting(name: str, gate: Gate) -> list[Waiting]:
    """Return the cases of one gate, oldest first: one more than `WAITING_MAX` where there are more. Raises StoreError."""
    terms = human_contract(gate.contract)
    found = cases.heads(gate.store, terms, limit=WAITING_MAX + 1)
    return [Waiting(name, head, head.impact(terms)) for head in found]


def row(of: Waiting, gate: Gate, currency: str, taken: Mapping[str, Taken]) -> QueueRow | None:
    """Return the row of a case; None: it waits no longer. `taken`: by dfid. Raises StoreError."""
    terms, head = human_contract(gate.contract), of.head
    case = cases.case_of(gate.store, terms, head)
    if case is None:
        return None
    return QueueRow(
        gate=of.gate,
        dfid=head.dfid,
        event_id=words.plain(head.event_id),
        since_ms=head.since_ms,
        reason="RECORD_DAMAGED" if case.damaged else head.reason,
        proposed=_proposed(terms, case, currency),
        leaning="" if case.damaged else leaning(case, gate.contract, currency),
        impact=None if case.damaged else of.impact,
        damaged=case.damaged,
        taken=taken.get(head.dfid),
    )


def _proposed(terms: Contract, case: Case, currency: str) -> str:
    action = case.action
    return " ".join((action, *(text for _, text in numbers(terms, action, case.numbers, currency)))) if action else ""


def queue(waiting: Sequence[Waiting], wanted: Wanted) -> Queue:
    """Return one page of cases, filtered and sorted. `waiting`: of each gate at most one case more than are listed."""
    more = any(count > WAITING_MAX for count in Counter(each.gate for each in waiting).values())
    waiting = [each for _, of_gate in groupby(waiting, lambda each: each.gate) for each in islice(of_gate, WAITING_MAX)]
    found = sorted((each for each in waiting if _fits(each, wanted)), key=lambda each: _sort_key(each, wanted.sort))
    pages = max(1, -(-len(found) // PAGE))
    page = min(wanted.page, pages)
    return Queue(
        cases=tuple(found[(page - 1) * PAGE : page * PAGE]),
        found=len(found),
        waiting=len(waiting),
        more=more,
        gates=_counts(each.gate for each in waiting),
        impacts=_counts(each.impact or "none" for each in waiting),
        reasons=_counts(each.head.reason for each in waiting),
        page=page,
        pages=pages,
    )


def at(name: str, gate: Gate, case: Case) -> Waiting:
    """Return the place of a case in the queue, also of one that waits no longer."""
    reason = "UNKNOWN" if case.unknown else case.reason_code or ""
    given = (case.dfid, case.event_id, case.agent_id, case.state, case.since_ms, reason, case.action, case.numbers)
    return Waiting(name, CaseHead(*given), case.impact(human_contract(gate.contract)))


def following(
    waiting: Iterable[Waiting], wanted: Wanted, after: Waiting | None, passed: Container[tuple[str, str]]
) -> Waiting | None:
    """Return the case that comes after another in the queue, else the queue's first; None: there is none. `passed`: the gates
    and dfids of cases that are passed over.
    """
    found = [each for each in waiting if _fits(each, wanted) and (each.gate, each.head.dfid) not in passed]
    found.sort(key=lambda each: _sort_key(each, wanted.sort))
    place = _sort_key(after, wanted.sort) if after else ("", -1, "")
    return next((each for each in found if _sort_key(each, wanted.sort) > place), found[0] if found else None)


def _sort_key(of: Waiting, sort: Sort) -> tuple[str, int, str]:
    return {"age": "", "impact": _IMPACTS[of.impact], "reason": of.head.reason}[sort], of.head.since_ms, of.head.dfid


def _fits(of: Waiting, wanted: Wanted) -> bool:
    has = ((wanted.gate, of.gate), (wanted.impact, of.impact or "none"), (wanted.reason, of.head.reason))
    return all(not asked or asked == value for asked, value in has)


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))

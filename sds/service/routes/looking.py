"""/v1/decisions: show one decision with its audit facts, or pages of them. Only reviewers see texts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request

from sds.kernel.audit.verify import flow_record
from sds.kernel.flow.states import Answer, State, known_answer
from sds.kernel.storage.store import Reader
from sds.service.callers import Viewer
from sds.service.gates import OpenGate
from sds.service.problems import Problem
from sds.service.routes.described import ok
from sds.service.schemas.decisions import DecisionList, ShownDecision
from sds.service.state import service

LIMIT, LIMIT_MAX = 50, 200
FLOWS_READ_MAX = 10_000  # flows of each record that are looked at for one page of one state
CURSOR_CHARS_MAX = 200
MS_MAX = 1 << 53
_DFID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FACTS = {
    "decision_flows": ("created_at_ms", "agent_id", "contract_hash", "restarts", "lease_until_ms"),
    "context_snapshots": ("snapshot_id", "envelope_hash", "taken_at_ms", "security"),
    "policy_proposals": ("policy_kind", "params", "model", "confidence", "tokens", "passes", "duration_ms"),
    "dim_validations": ("outcome", "gate_reached", "reason_code", "attempt_number", "evaluated_at_ms"),
    "human_decisions": ("decision", "who", "impact", "acknowledged", "decided_at_ms"),
    "execution_log": (
        "idempotency_key",
        "kind",
        "params",
        "status",
        "external_receipt",
        "reserved_at_ms",
        "executed_at_ms",
    ),
}
_ENTRY = ("idx", "at_ms", "kind", "entry_hash")
PAGE = (
    "SELECT created_at_ms, dfid FROM decision_flows WHERE (created_at_ms, dfid) >= (?, ?)"
    " AND (created_at_ms, dfid) < (?, ?){state} ORDER BY created_at_ms DESC, dfid DESC LIMIT ?"
)

router = APIRouter(tags=["decisions"])


@router.get("/v1/decisions/{dfid}", responses=ok(ShownDecision))
def get_decision(request: Request, dfid: str, who: Viewer) -> dict[str, Any]:
    """Show one decision as it stands now, with its audit facts.

    With the role `review` the answer also has `record`: the whole record of the decision, with its texts.
    """
    gates = service(request).gates_of(who).values()
    return _shown(gates, dfid, texts="review" in who.roles)


@router.get("/v1/decisions", responses=ok(DecisionList))
def list_decisions(
    request: Request,
    who: Viewer,
    gate: Annotated[str | None, Query(description="Only decisions of this gate.", max_length=64)] = None,
    state: Annotated[State | None, Query(description="Only decisions in this state.")] = None,
    since: Annotated[int, Query(description="Opened at or after: milliseconds since 1970.", ge=0, le=MS_MAX)] = 0,
    until: Annotated[int, Query(description="Opened before: milliseconds since 1970.", ge=1, le=MS_MAX)] = MS_MAX,
    cursor: Annotated[str | None, Query(description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(description="The maximum number.", ge=1, le=LIMIT_MAX)] = LIMIT,
) -> dict[str, Any]:
    """List decisions as they stand now, the newest first, without texts.

    A page of one state looks at no more than 10,000 decisions of each gate. It may hold fewer than `limit`, or none, and
    still have a `next`.
    """
    served = service(request)
    if gate is not None:
        who.check("read", gate)
    gates = served.gates_of(who).values() if gate is None else (served.gate(gate),)
    if until <= since:
        raise Problem("USAGE", "`until` is not after `since`", hint="swap the two times")
    after = min(Cursor.parse(cursor), Cursor(until, "")) if cursor is not None else Cursor(until, "")
    page = Page(since, after, state, limit)
    return _page(gates, page)


@dataclass(frozen=True, order=True, slots=True)
class Cursor:
    """A place in the list of decisions: after the flow with this opening time (milliseconds since 1970) and id."""

    at_ms: int
    dfid: str

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(orjson.dumps([self.at_ms, self.dfid])).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read a cursor. Raises Problem for a text that is no cursor of this service."""
        try:
            if len(text) > CURSOR_CHARS_MAX or not re.fullmatch(r"[A-Za-z0-9_-]+", text):
                raise Problem("CURSOR_INVALID")
            at_ms, dfid = orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (ValueError, TypeError, binascii.Error):
            raise Problem("CURSOR_INVALID") from None
        if type(at_ms) is not int or not 0 <= at_ms <= MS_MAX or type(dfid) is not str or not _DFID.fullmatch(dfid):
            raise Problem("CURSOR_INVALID")
        return cls(at_ms, dfid)


@dataclass(frozen=True, slots=True)
class Page:
    """The flows that a request asks for: opened at or after `since_ms`, after the place `after`, in one state or in any."""

    since_ms: int
    after: Cursor
    state: str | None
    limit: int

    def last(self, store: Reader) -> Cursor | None:
        """Return the last flow of one record, in the list's order, that this page looks at; None: it looks at all."""
        if self.state is None:
            return None
        values = (self.since_ms, "", self.after.at_ms, self.after.dfid, 1, FLOWS_READ_MAX - 1)
        row = store.row(f"{PAGE.format(state='')} OFFSET ?", values)
        return Cursor(*row) if row else None

    def rows(self, store: Reader, last: Cursor | None) -> list[tuple[int, str]]:
        """Return (opened, dfid) of one record's flows on this page, newest first, down to `last` inclusive."""
        begin = last or Cursor(self.since_ms, "")
        between = (begin.at_ms, begin.dfid, self.after.at_ms, self.after.dfid)
        if self.state is None:
            rows = store.rows(PAGE.format(state=""), (*between, self.limit))
        else:
            rows = store.rows(PAGE.format(state=" AND state = ?"), (*between, self.state, self.limit))
        return [(row[0], row[1]) for row in rows]

    def flows(self, stores: Sequence[Reader]) -> tuple[list[tuple[int, str, Reader]], Cursor | None]:
        """Return (opened, dfid, record) of all records' flows on this page, newest first, and the next page's cursor."""
        last = max((each for store in stores if (each := self.last(store))), default=None)
        listed = merge(
            *([(*row, store) for row in self.rows(store, last)] for store in stores),
            key=lambda each: each[:2],
            reverse=True,
        )
        found = list(islice(listed, self.limit))
        return found, Cursor(*found[-1][:2]) if len(found) == self.limit else last


def _page(gates: Iterable[OpenGate], page: Page) -> dict[str, Any]:
    flows, following = page.flows([gate.gate.store for gate in gates])
    shown = [{"opened_at_ms": at_ms, **without_texts(known_answer(store, dfid))} for at_ms, dfid, store in flows]
    return {"decisions": shown, "next": str(following) if following else None}


def _shown(gates: Iterable[OpenGate], dfid: str, *, texts: bool) -> dict[str, Any]:
    stores = (gate.gate.store for gate in gates) if _DFID.fullmatch(dfid) else ()
    for store in stores:
        record = flow_record(store, dfid)
        if record is not None:
            answer = known_answer(store, dfid)
            shown = {"decision": answer.as_data() if texts else without_texts(answer), "audit": _facts(record)}
            return shown | ({"record": record} if texts else {})
    raise Problem("DFID_UNKNOWN", retryable=bool(_DFID.fullmatch(dfid)))


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flow's facts for an audit, without texts: numbers, hashes, codes and times."""
    tables = {table: record[table] for table in _FACTS}
    facts = {
        table: None if row is None else {name: row[name] for name in _FACTS[table]} for table, row in tables.items()
    }
    return facts | {"ledger": [{name: entry[name] for name in _ENTRY} for entry in record["ledger"]]}


def without_texts(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON data. Of its justification and reasons only the codes stay: a model may quote what it read."""
    code = None if answer.justification is None else answer.justification.partition(":")[0]
    reasons = [":".join(each.split(":")[:2]) for each in answer.reasons]
    return {**answer.as_data(), "justification": code, "reasons": reasons}

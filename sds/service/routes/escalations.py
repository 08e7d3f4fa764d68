"""/v1/escalations: list, show and resolve cases that wait for a human. Only the role `review` sees a case's texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from sds.gate import Gate
from sds.host.clock import when
from sds.kernel.canonical import REASON_CHARS_MAX
from sds.kernel.executor.protocol import REFERENCE_CHARS_MAX
from sds.kernel.human.cases import BEFORE_ALL, Decision, Place
from sds.kernel.human.parsing import Number
from sds.kernel.human.review import Resolution
from sds.service import review
from sds.service.callers import Caller, Reviewer, Viewer
from sds.service.console import taken
from sds.service.console.taken import KEPT_MS, Taken
from sds.service.fields import FLAG, OBJECT, TEXT, as_written, body_schema, read_fields
from sds.service.problems import Problem
from sds.service.routes.described import ok
from sds.service.routes.looking import Cursor
from sds.service.schemas import cases, decisions
from sds.service.state import Service, service

LIMIT_MAX = 1_000
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?")

_REQUIRED = {"decision": TEXT, "reason": TEXT}
_OPTIONAL = {"change": OBJECT, "seen": TEXT, "reference": TEXT, "acknowledge": FLAG}
_SAID: dict[str, dict[str, Any]] = {
    "decision": {"enum": list(get_args(Decision))},
    "reason": {"description": f"Why, for the record: at most {REASON_CHARS_MAX} characters."},
    "change": {
        "description": "With MODIFY: the other decision. The numbers of `params` with all their decimals, best as text: `5.00`.",
        "properties": {
            "action": {"type": TEXT},
            "params": {"type": OBJECT, "additionalProperties": {"type": [TEXT, "number"]}},
            "reason": {"type": TEXT, "description": "A reason code of the choice."},
        },
        "required": ["action", "reason"],
    },
    "seen": {"description": "The `now.id` of the case as it was shown."},
    "reference": {
        "description": f"With SETTLED: the external system's id of what was carried out, at most {REFERENCE_CHARS_MAX} characters."
    },
    "acknowledge": {"description": "The person knows that the decision is of HIGH impact."},
}

router = APIRouter(prefix="/v1/escalations", tags=["escalations"])


@router.get("", responses=ok(cases.WaitingCases))
def list_escalations(
    request: Request,
    who: Viewer,
    gate: str | None = None,
    cursor: Annotated[str | None, Query(description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = 100,
) -> dict[str, Any]:
    """List the cases that wait for a human at the gates of the key, the oldest first: age, impact, reason, proposal, and
    who has taken it.

    `waiting`: how many there are, listed or not. `next`: the cursor of the next page, or null.
    """
    state = service(request)
    who.check("read", gate)
    gates = [state.gate(gate).gate] if gate is not None else [each.gate for each in state.gates_of(who).values()]
    after = Cursor.parse(cursor) if cursor is not None else None
    return _waiting(state, gates, limit, (after.at_ms, after.dfid) if after else BEFORE_ALL)


def _waiting(state: Service, gates: Sequence[Gate], limit: int, after: Place) -> dict[str, Any]:
    now_ms = state.now_ms()
    listed = [case for gate in gates for case in review.waiting(gate, limit=limit, now_ms=now_ms, after=after)]
    page = sorted(listed, key=lambda each: each[0])[:limit]
    holders = {gate.contract.gate: taken.of_gate(state.database, gate.contract.gate, now_ms) for gate in gates}
    return {
        "escalations": [case | _taken(holders[case["gate"]], case["dfid"]) for _, case in page],
        "waiting": sum(review.count_waiting(gate) for gate in gates),
        "next": str(Cursor(*page[-1][0])) if len(page) == limit else None,
    }


def _taken(holders: Mapping[str, Taken], dfid: str) -> dict[str, str | None]:
    """Return who has taken a case and until when, both None where nobody has. Anybody may decide it all the same."""
    by = holders.get(dfid)
    return {"taken_by": by.who if by else None, "taken_until": when(by.at_ms + KEPT_MS) if by else None}


@router.get("/{dfid}", responses=ok(cases.ShownCase))
def get_escalation(request: Request, dfid: str, who: Reviewer) -> dict[str, Any]:
    """Show one case with everything needed to decide it: packet, evidence, alternatives, and what changed since."""
    state, gate = service(request), _gate_of(request, who, dfid)
    now_ms = state.now_ms()
    holders = taken.of_gate(state.database, gate.contract.gate, now_ms)
    return review.case(gate, dfid, now_ms=now_ms) | _taken(holders, dfid)


@router.post(
    "/{dfid}/resolution", responses=ok(decisions.AnswerSchema), openapi_extra=body_schema(_REQUIRED, _OPTIONAL, _SAID)
)
async def resolve_escalation(request: Request, dfid: str, who: Reviewer) -> dict[str, Any]:
    """Resolve a case, once. `decision`: OVERRIDE, MODIFY (with `change`), RETURN or ABORT; for an UNKNOWN order SETTLED
    (with `reference`) or REJECTED. `seen`: the `now.id` of the case as shown. `acknowledge`: true accepts HIGH impact.
    """
    given = await read_fields(request, _REQUIRED, _OPTIONAL)
    decided = _decision(given, who)

    def made() -> dict[str, Any]:
        return review.decide(_gate_of(request, who, dfid), dfid, decided).as_data()

    return await run_in_threadpool(made)


def _decision(given: dict[str, Any], who: Caller) -> Resolution:
    if given["decision"] not in get_args(Decision):
        raise Problem("USAGE", f"the field `decision` must be one of {', '.join(get_args(Decision))}")
    return Resolution(
        decision=given["decision"],
        who=who.name,
        reason=given["reason"],
        change=_change(given["change"]) if "change" in given else "",
        seen=given.get("seen", ""),
        reference=given.get("reference", ""),
        acknowledged=given.get("acknowledge", False),
    )


def _change(given: dict[str, Any]) -> str:
    """Return the JSON of a change. A number of its `params` may be a text: many programs write the number 5.00 as 5."""
    params = given.get("params")
    if not isinstance(params, dict):
        return as_written(given)
    numbers = {
        name: Number(each) if isinstance(each, str) and _DECIMAL.fullmatch(each) else each
        for name, each in params.items()
    }
    return as_written({**given, "params": numbers})


def _gate_of(request: Request, who: Caller, dfid: str) -> Gate:
    """Return the gate that the caller may see whose record has a flow. Raises Problem (404)."""
    gates = [each.gate for each in service(request).gates_of(who).values()]
    gate = review.gate_of(gates, dfid)
    if gate is None:
        hint = "GET /v1/escalations lists the cases that wait"  # which are always on record: no retry
        raise Problem("DFID_UNKNOWN", "no record that this key may read has this case", hint=hint, retryable=False)
    return gate

"""`dir-core` in a process of its own, asked by `sds bench kernel`. Argument: FOLDER, for its record.

Its contract states what it has a form for: the permitted kinds, and an amount of at least one cent. It has no form for
rules over the state of the case: these are a validator in Python, as its documentation extends contracts.
Answers {"cases": [[fields, kind, amount], ...]} with {"found": [what it accepts]}, {"measure": NAME, "times": n,
"warm_up": n} with {"found": a summary in microseconds}:

    jit      its drift check, of the fields in `then` and `now`
    verdict  from the bytes of a proposal to its verdict
    decided  the same through its runtime, on its SQLite storage, and carried out once under its idempotency guard
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sds.benchmarks.lib.measuring import summary, timed_us
from sds.benchmarks.peer.drivers.serving import LoadedModel, converse

AGENT, REFUND = "refund-agent", "REFUND_TICKET"
LATE_DEPARTURE_MIN, LATE_ARRIVAL_MIN = 300, 180
Fields = dict[str, Any]


class DirCore:
    """One runtime of `dir-core` with its contract; answers the benchmark's requests."""

    def __init__(self, folder: Path) -> None:
        self._core = import_module("dir_core")
        self._models = import_module("dir_core.models")
        storage = import_module("dir_core.storage").sqlite_storage(str(folder / "dir-core.db"))
        self._runtime = self._core.DecisionRuntime(storage)
        self._guard = self._core.IdempotencyGuard(storage.idempotency)
        self._contract = self._models.RuntimeContractProjection(
            agent_id=AGENT,
            mission="Decide claims.",
            invariants=[
                {"id": "kinds", "type": "set", "field": "policy_kind", "allowed": ["DENY", REFUND, "COMPENSATE"]},
                {
                    "id": "least",
                    "type": "range",
                    "field": "params.amount",
                    "min": 1,
                    "applies_to_policy_kinds": [REFUND],
                },
            ],
        )
        answer = self._runtime.register_projection(self._contract, "1.0.0")
        if not answer.accepted:
            raise RuntimeError(f"its registry refuses the contract: {answer.reason}")
        self._once: dict[str, Callable[[dict[str, Any], int], object]] = {
            "jit": self._drift,
            "verdict": self._verdict,
            "decided": self._decided,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "cases" in request:
            asked = request["cases"]
            return {"found": [self._accepts(fields, self._said(kind, amount)) for fields, kind, amount in asked]}
        once = self._once[request["measure"]]
        request["said"] = self._said(REFUND, request.get("amount", 0))
        for i in range(request["warm_up"]):
            once(request, i)
        first = request["warm_up"]
        taken = [timed_us(partial(once, request, i)) for i in range(first, first + request["times"])]
        return {"found": summary(taken)}

    def _drift(self, request: dict[str, Any], _: int) -> None:
        then, now, tolerance = request["then"], request["now"], request["tolerance"]
        if not self._core.verify_drift(then, now, keys_to_compare=request["keys"], tolerance=tolerance)[0]:
            raise RuntimeError("it reports a drift where there is none")

    def _verdict(self, request: dict[str, Any], _: int) -> None:
        if not self._accepts(request["fields"], request["said"]):
            raise RuntimeError("it does not accept the benchmark's proposal")

    def _decided(self, request: dict[str, Any], i: int) -> None:
        proposal = self._models.PolicyProposal.model_validate_json(request["said"].replace(b"flow-0", b"flow-%d" % i))
        verdict, reason = self._runtime.evaluate_proposal(
            proposal, request["fields"], custom_validators=[permitted], now=datetime.now(UTC)
        )
        if verdict != self._core.ValidationVerdict.ACCEPT:
            raise RuntimeError(f"it does not accept the benchmark's decision: {reason}")
        self._guard.run(proposal.dfid, "execute", proposal.params, lambda **_: {"settled": proposal.dfid})

    def _accepts(self, fields: Fields, said: bytes) -> bool:
        proposal = self._models.PolicyProposal.model_validate_json(said)
        verdict, _ = self._core.validate_proposal(
            proposal, {"web": fields}, allowed_agents=[AGENT], contract=self._contract, custom_validators=[permitted]
        )
        return bool(verdict == self._core.ValidationVerdict.ACCEPT)

    def _said(self, kind: str, amount: int) -> bytes:
        params = {"amount": amount} if amount else {}
        said = {"dfid": "flow-0", "agent_id": AGENT, "policy_kind": kind, "params": params, "context_ref": "0" * 64}
        return json.dumps(said | {"confidence": 0.9}).encode()


def permitted(proposal: Any, context: dict[str, Any], _: dict[str, Any]) -> str | None:
    """Return why the state of the case does not permit a proposal, or None: the rule of `benchmarks/peer/cedar.py`."""
    fields, kind = context["web"], proposal.policy_kind
    if kind == "DENY":
        return None
    late = (
        fields["flight.dep_delay_min"] >= LATE_DEPARTURE_MIN
        if kind == REFUND
        else fields["flight.arr_delay_min"] >= LATE_ARRIVAL_MIN
    )
    open_minor = fields["ticket.refundable_minor"]
    if not fields["flight.due"] or not (late or fields["flight.cancelled"]):
        return "NOT_DUE"
    if open_minor <= 0 or fields["ticket.compensations_left"] <= 0:
        return "NOTHING_LEFT"
    return "TOO_MUCH" if kind == REFUND and proposal.params["amount"] > open_minor else None


def opened() -> LoadedModel:
    return "SQLite storage, state rules as a validator", ("dir-core",), DirCore(Path(sys.argv[1])).answer


if __name__ == "__main__":
    converse(opened)

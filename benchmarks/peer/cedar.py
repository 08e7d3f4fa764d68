"""The refund gate's authority as Cedar policies, to ask Cedar the same question.

Cedar answers yes or no to one proposed action. The kernel derives what is permitted now, with bounds, and judges a
proposal with five gates. So Cedar's row is compared with two of ours: the same yes or no, and the whole verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from sds.kernel.contract.compiler import Rules
from sds.kernel.envelope.proposal import Proposal
from sds.kernel.envelope.state import Value

POLICIES = """
permit (principal == Agent::"refund-agent", action == Action::"DENY", resource);
permit (principal == Agent::"refund-agent", action == Action::"REFUND_TICKET", resource) when {
    context.due && (context.cancelled || context.dep_delay_min >= 300) && context.refundable_minor > 0
    && context.compensations_left > 0 && context.amount_minor >= 1 && context.amount_minor <= context.refundable_minor
};
permit (principal == Agent::"refund-agent", action == Action::"COMPENSATE", resource) when {
    context.due && (context.cancelled || context.arr_delay_min >= 180) && context.refundable_minor > 0
    && context.compensations_left > 0
};
"""
FIELDS = {
    "due": "flight.due",
    "cancelled": "flight.cancelled",
    "arr_delay_min": "flight.arr_delay_min",
    "dep_delay_min": "flight.dep_delay_min",
    "refundable_minor": "ticket.refundable_minor",
    "compensations_left": "ticket.compensations_left",
}
Ask = Callable[[Mapping[str, Value], Proposal], bool]


def cedar() -> Ask | None:
    """Return a function that asks Cedar about a state and a proposal, with parsed policies; None: it is not installed."""
    try:
        import cedarpy  # noqa: PLC0415  an optional peer
    except ModuleNotFoundError:
        return None
    policies, entities = cedarpy.PolicySet.from_str(POLICIES), cedarpy.Entities.from_json_str("[]")

    def ask(fields: Mapping[str, Value], proposal: Proposal) -> bool:
        context = {name: fields[path] for name, path in FIELDS.items()}
        context["amount_minor"] = sum(int(text.replace(".", "")) for _, text in proposal.params)
        request = {
            "principal": 'Agent::"refund-agent"',
            "action": f'Action::"{proposal.action}"',
            "resource": 'Ticket::"T1"',
            "context": json.dumps(context),
        }
        return bool(cedarpy.is_authorized(request, policies, entities).allowed)

    return ask


def ours(rules: Rules) -> Ask:
    """Return a function that asks the contract the same: whether the proposal is within the state's envelope."""
    return lambda fields, proposal: not rules.envelope(fields).objections(proposal)


def cases(fields: Mapping[str, Value]) -> Iterator[tuple[Mapping[str, Value], Proposal]]:
    """Yield states and proposals on both sides of every bound."""
    proposals = [Proposal("DENY", (), "NOT_ELIGIBLE", "0" * 64), Proposal("COMPENSATE", (), "LONG_DELAY", "0" * 64)]
    proposals += [
        Proposal("REFUND_TICKET", (("amount", a),), "NOT_TRAVELLED", "0" * 64) for a in ("0.01", "300.00", "300.01")
    ]
    for due, cancelled, arrival, departure, left in product(
        (True, False), (True, False), (179, 180), (299, 300), (0, 1)
    ):
        moved = {
            "flight.due": due,
            "flight.cancelled": cancelled,
            "flight.arr_delay_min": arrival,
            "flight.dep_delay_min": departure,
            "ticket.compensations_left": left,
        }
        for proposal in proposals:
            yield {**fields, **moved}, proposal

"""The contract's policy is the written adjudication rule: told the true cause, it decides what a careful human would."""

from __future__ import annotations

from itertools import product

from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.gate import load_refund_contract
from sds.gates.refund.world.claims import SEVERE, Cause
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.policy import policy_rules
from sds.kernel.envelope.state import Value
from tests.gates.refund.test_refund_policy import ON_TIME

CONTRACT = load_refund_contract()
RULES, POLICY = Rules(CONTRACT), policy_rules(CONTRACT)
STATES: dict[str, tuple[Value, ...]] = {
    "flight.due": (True, False),
    "flight.cancelled": (False, True),
    "flight.arr_delay_min": (0, 59, 60, 179, 180, 400),
    "flight.dep_delay_min": (0, 299, 300),
    "weather.condition": ("clear", "rain", "snow", "fog", "wind", "storm", "unknown"),
    "ticket.fare_minor": (999, 1000, 20_000),
    "ticket.refundable_minor": (0, 20_000),
    "ticket.compensations_left": (0, 1),
    "ticket.vouchers_left": (0, 1),
}


def test_the_contract_knows_every_cause_and_every_severe_weather() -> None:
    assert [cause.value for cause in Cause] == list(CONTRACT.readings["cause"].values)
    assert {"snow", "fog", "wind", "storm"} == SEVERE


def test_told_the_cause_it_decides_as_the_written_rule_and_within_the_envelope() -> None:
    decided = 0
    for values in product(*STATES.values()):
        fields = {**ON_TIME, **dict(zip(STATES, values, strict=True))}
        envelope = RULES.envelope(fields)
        for cause in Cause:
            found = POLICY.propose(fields, {"cause": cause.value})
            assert expected_action(fields, cause) == found.action, (fields, cause)
            permitted = envelope.kind(found.action)
            assert permitted is not None, (fields, cause)
            assert found.action == "ESCALATE" or found.reason in permitted.reasons
            assert all(value in dict(permitted.params)[name] for name, value in found.params)
            decided += 1
    assert decided == 2 * 2 * 6 * 3 * 7 * 3 * 2 * 2 * 2 * 9

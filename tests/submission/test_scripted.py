"""An engine that says what a test says: the kernel judges it as it judges a model."""

from __future__ import annotations

import pytest

from sds import DecisionPacket, ModelError, ScriptedEngine, proposal
from tests.attack.testbed import Testbed


def test_what_is_permitted_is_carried_out_in_minor_units(bed: Testbed) -> None:
    engine = ScriptedEngine(lambda packet: proposal(packet, "PAY", amount=1234), confidence=0.75)
    with bed.gate(engine=engine) as gate:
        answer = gate.decide(bed.event(1))
    assert ("PAY", {"amount": 1234}, "OWED", "SUCCESS", 0.75) == (
        answer.action, dict(answer.params), answer.justification, answer.execution, answer.confidence,
    )  # fmt: skip
    assert [answer.dfid] == [packet.dfid for packet in engine.packets]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("PAY", {"amount": 0}),
        ("PAY", {"amount": 10**15}),
        ("PAY", {}),
        ("DENY", {"amount": 1}),
        ("GIVE", {}),
        ("DENY", {"reason": "OWED"}),
        ("DENY", {"rationale": "because"}),
    ],
)
def test_what_is_forbidden_is_written_and_refused(bed: Testbed, kind: str, given: dict[str, int]) -> None:
    engine = ScriptedEngine(lambda packet: proposal(packet, kind, **given))
    with bed.gate(engine=engine) as gate:
        answer = gate.decide(bed.event(1))
    assert ("ESCALATED", None) == (answer.state, answer.execution)
    assert len(engine.packets) > 1


def test_what_it_raises_hands_the_case_to_a_human(bed: Testbed) -> None:
    def fail(_: DecisionPacket) -> bytes:
        raise ModelError("the model is asleep")

    with bed.gate(engine=ScriptedEngine(fail)) as gate:
        answer = gate.decide(bed.event(1))
    assert ("ESCALATED", "MODEL_UNAVAILABLE") == (answer.state, answer.reason_code)


def test_without_a_confidence_none_is_measured(bed: Testbed) -> None:
    with bed.gate(engine=ScriptedEngine(lambda packet: proposal(packet, "DENY"), confidence=None)) as gate:
        assert gate.decide(bed.event(1)).confidence is None

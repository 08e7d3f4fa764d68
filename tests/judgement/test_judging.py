"""What is measured is what the engine does: the same decision, the same confidence, the same reason to escalate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sds.definitions.definition import LabelledCase
from sds.judgement.judging import Judge, Judged, Readings, decided_kinds
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, compile_packet
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import ModelError
from sds.models.readers.protocol import ReaderError, Reading
from sds.policy.engine import PolicyEngine
from sds.policy.readers import FittedAnswers, as_read
from tests.judgement.claims import CLAIMS, contract
from tests.policy.scripted import no_model

FIELDS = {"trip.delay_min": 90, "trip.open_minor": 5000, "trip.known": True}
UNBOUNDED = contract(CLAIMS.replace("max_error: 0.05\n", ""))


class Says:
    kind, values, sha256 = "head", ("fault", "storm", "none"), "0" * 64

    def __init__(self, shares: tuple[float, float, float], *, familiar: bool = True) -> None:
        self._reading = Reading(dict(zip(self.values, shares, strict=True)), familiar)
        self.texts = list[str]()

    def read(self, text: str, fields: Any = None, readings: Any = None) -> Reading:
        self.texts.append(text)
        return self._reading

    def close(self) -> None: ...


def case(**changed: Any) -> LabelledCase:
    return replace(LabelledCase("the brake broke", FIELDS, {"cause": "fault"}, amount_minor=1000), **changed)


def judged(reader: Says, labelled: LabelledCase, terms: Contract = UNBOUNDED) -> Judged:
    return Judge(terms, Readings(terms, {"cause": reader})).judge(labelled)


def packet(terms: Contract, labelled: LabelledCase) -> DecisionPacket:
    rules = Rules(terms)
    inputs = EnvelopeInputs(
        labelled.fields, agent_active=True, in_effect=True, halted=False, spend_left=None, context_whole=True
    )
    return compile_packet(
        terms,
        rules,
        dfid="d",
        event_id="e",
        key="k",
        evidence=labelled.text,
        live=LiveState(inputs, "1", {}, terms.hash),
        envelope=rules.envelope(labelled.fields),
        now_ms=1000,
    )


def proposed(terms: Contract, reader: Says, labelled: LabelledCase) -> tuple[Proposal, Any]:
    engine = PolicyEngine(
        terms,
        {"cause": FittedAnswers("fitted", reader)},
        None,
        language_model=no_model(),
        now_ms=lambda: 1000,
        facts={},
    )
    data, decoding = engine.propose(packet(terms, labelled), tokens_max=10)
    found = parse_proposal(data)
    assert isinstance(found, Proposal)
    return found, decoding


CASES = {
    "certain": (Says((0.9, 0.06, 0.04)), case(), "PAY", ""),
    "another value": (Says((0.1, 0.8, 0.1)), case(), "DENY", ""),
    "a line that escalates": (Says((0.1, 0.1, 0.8)), case(), None, "POLICY_ESCALATES"),
    "unfamiliar": (Says((0.9, 0.06, 0.04), familiar=False), case(), None, "UNFAMILIAR"),
    "tied": (Says((0.4, 0.4, 0.2)), case(), None, "UNCERTAIN"),
    "forbidden": (
        Says((0.9, 0.06, 0.04)),
        case(fields=FIELDS | {"trip.open_minor": 500}),
        None,
        "POLICY_FORBIDDEN",
    ),
    "not permitted at all": (
        Says((0.9, 0.06, 0.04)),
        case(fields=FIELDS | {"trip.known": False}),
        None,
        "POLICY_FORBIDDEN",
    ),
    "whatever is read": (Says((0.4, 0.3, 0.3)), case(fields=FIELDS | {"trip.delay_min": 10}), "DENY", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_judged_as_the_engine_decides_it(name: str) -> None:
    reader, labelled, kind, why = CASES[name]
    found = judged(reader, labelled)
    proposal, decoding = proposed(UNBOUNDED, reader, labelled)
    assert (kind, why) == (found.decided[0] if found.decided else None, found.why)
    assert (kind or ESCALATE) == proposal.action
    assert why == decoding.escalation
    assert decoding.confidence == pytest.approx(found.confidence)


def test_what_is_right_is_what_the_policy_makes_of_the_true_reading_or_what_is_labelled() -> None:
    reads_fault = Says((0.9, 0.06, 0.04))
    assert judged(reads_fault, case()).right
    assert judged(reads_fault, case(readings={"cause": "storm"})).wrong
    assert judged(reads_fault, case(readings={"cause": "none"})).wrong  # a human should have decided
    assert judged(reads_fault, case(readings={}, decision="PAY")).right
    assert judged(reads_fault, case(decision="DENY")).wrong


def test_to_escalate_is_right_where_it_should_be_and_wrong_nowhere() -> None:
    escalates = Says((0.1, 0.1, 0.8))
    assert judged(escalates, case(readings={"cause": "none"})).right
    found = judged(escalates, case())
    assert (False, False) == (found.right, found.wrong)


def test_a_case_is_judged_only_with_all_its_fields_and_its_truth() -> None:
    judge = Judge(UNBOUNDED, Readings(UNBOUNDED, {}))
    assert judge.judges(case())
    assert not judge.judges(case(fields={}))
    assert not judge.judges(case(fields={"trip.delay_min": 90}))
    assert not judge.judges(case(readings={}))


@pytest.mark.parametrize("text", ["  the brake\nbroke ", "card 4111 1111 1111 1111", "x" * 1000, "délai"])
def test_a_reader_is_given_a_text_as_it_would_be_in_a_packet(text: str) -> None:
    reader = Says((0.9, 0.06, 0.04))
    judged(reader, case(text=text))
    assert [as_read(UNBOUNDED, text)] == reader.texts
    from sds.kernel.flow.intake import read_event
    from sds.policy.readers import evidence_of

    event = read_event(UNBOUNDED, {"claim_id": "c", "trip_id": "t", "text": text})
    assert evidence_of(packet(UNBOUNDED, case(text=event.evidence))) == reader.texts[0]


def test_a_text_is_read_once() -> None:
    reader = Says((0.9, 0.06, 0.04))
    readings = Readings(UNBOUNDED, {"cause": reader})
    for _ in range(3):
        readings.of_case(case())
    assert 1 == len(reader.texts)


def test_a_reader_that_fails_or_says_no_probabilities_is_told_in_one_line() -> None:
    class Fails(Says):
        def read(self, text: str, fields: Any = None, readings: Any = None) -> Reading:
            raise ReaderError("the session is broken", hint="fit it anew")

    with pytest.raises(ModelError, match="the session is broken"):
        judged(Fails((1, 0, 0)), case())
    with pytest.raises(ModelError, match="do not add up"):
        judged(Says((0.9, 0.9, 0.9)), case())


def test_only_kinds_that_the_policy_proposes_have_a_threshold() -> None:
    assert ("DENY", "PAY") == decided_kinds(UNBOUNDED)

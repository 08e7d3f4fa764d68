"""The policy as an engine: one proposal within the envelope, or a human, whatever the readers say."""

from __future__ import annotations

from random import Random

import pytest

from sds.engines.breaker import FAILURES_MAX, Breaker, EngineDownError
from sds.kernel.decision import dim
from sds.kernel.decision.dim import WHY_ESCALATED
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import ModelError
from sds.models.readers.protocol import Reading
from tests.kernel import world
from tests.policy.scripted import Says, contract, engine_of, on_demand
from tests.proposers import Greedy
from tests.proposers import Says as Proposes
from tests.scale import scale, seeded

ANGRY = {"calm": 0.05, "angry": 0.9, "odd": 0.05}
CALM = {"calm": 0.9, "angry": 0.05, "odd": 0.05}


def proposed(data: bytes) -> Proposal:
    found = parse_proposal(data)
    assert isinstance(found, Proposal)
    return found


def decide(mood: Says, risk: float = 0.1, more: str = "", **kept: object) -> tuple[Proposal, Decoding]:
    state = {name: value for name, value in kept.items() if "_" in name and name != "language_model"}
    terms = contract(more)
    packet = world.packet(terms, world.situation(world.fields(**state)), evidence="late again")  # type: ignore[arg-type]
    how = {name: value for name, value in kept.items() if name in ("least", "language_model")}
    data, decoding = engine_of(terms, mood, risk, **how).propose(packet, tokens_max=10)  # type: ignore[arg-type]
    assert packet.envelope.contains(data)
    return proposed(data), decoding


def test_the_likeliest_decision_is_proposed_and_how_likely_it_is_right_is_the_confidence() -> None:
    found, decoding = decide(Says(ANGRY))
    assert ("PAY", "LATE", (("amount", "5.00"),)) == (found.action, found.reason_code, found.params)
    assert decoding.confidence == pytest.approx(
        0.95 * 0.9
    )  # odd pays the same, for another reason; were the risk 1: DENY
    assert ({"mood": ANGRY, "risk": {"score": 0.1}}, 1, "policy") == tuple(
        decoding.facts[name] for name in ("readings", "policy_line", "mode")
    )
    assert ["reading.mood", "reading.risk", "decision"] == [each["choice"] for each in decoding.alternatives or ()]


def test_a_score_is_read_last_and_given_the_others() -> None:
    risk, terms = Says({"score": 0.9}), contract()
    engine = engine_of(terms, Says(CALM))
    engine._answers = {"risk": risk, "mood": Says(CALM)}
    found = proposed(engine.propose(world.packet(terms), tokens_max=10)[0])
    assert ("DENY", [{"mood": CALM}]) == (found.action, risk.found)


@pytest.mark.parametrize(
    ("mood", "kept", "why"),
    [
        (Says(ANGRY, familiar=False), {}, "UNFAMILIAR"),
        (Says(ANGRY), {"more": "max_error: 0.02\n", "least": 0.96}, "UNCERTAIN"),
        (Says(ANGRY), {"more": "max_error: 0.02\n", "least": None}, "UNCERTAIN"),
        (Says(ANGRY), {"account_left": 0}, "POLICY_FORBIDDEN"),
        (Says(CALM), {"claim_minutes": 91, "claim_size": "small"}, "POLICY_FORBIDDEN"),
        (Says(CALM), {"claim_minutes": 13}, "POLICY_ESCALATES"),
        (Says({"calm": 0.5, "angry": 0.5, "odd": 0.0}), {"claim_minutes": 91}, "UNCERTAIN"),
    ],
)
def test_what_is_not_known_well_enough_is_a_humans(mood: Says, kept: dict[str, object], why: str) -> None:
    found, decoding = decide(mood, **kept)  # type: ignore[arg-type]
    assert ("ESCALATE", why) == (found.action, decoding.escalation)
    assert why in WHY_ESCALATED


def test_a_kind_that_is_not_bounded_needs_no_threshold() -> None:
    found, decoding = decide(Says(ANGRY), more="max_error: {kinds: {DENY: 0.02}}\n", least=None)
    assert ("PAY", "") == (found.action, decoding.escalation)
    assert "ESCALATE" == decide(Says(CALM), 0.9, "max_error: {kinds: {DENY: 0.02}}\n", least=None)[0].action


def test_at_the_threshold_itself_it_is_decided() -> None:
    mood = Says({"calm": 0.25, "angry": 0.75, "odd": 0.0})
    assert "PAY" == decide(mood, 0.0, "max_error: 0.02\n", least=0.75)[0].action
    assert "ESCALATE" == decide(mood, 0.0, "max_error: 0.02\n", least=0.7500001)[0].action


def test_a_decision_that_a_score_nearly_turned_is_as_uncertain_as_the_score() -> None:
    mood = Says({"calm": 0.0, "angry": 1.0, "odd": 0.0})
    assert "PAY" == decide(mood, 0.25, "max_error: 0.02\n", least=0.75)[0].action
    found, decoding = decide(mood, 0.25001, "max_error: 0.02\n", least=0.75)
    assert ("ESCALATE", "UNCERTAIN") == (found.action, decoding.escalation)


def test_the_kernel_records_why_and_no_word_of_its_own() -> None:
    terms = contract()
    packet = world.packet(terms)
    for code, expected in (("UNFAMILIAR", "UNFAMILIAR"), ("APPROVE", "ESCALATED_BY_AGENT"), ("", "ESCALATED_BY_AGENT")):
        data, _ = engine_of(terms, Says(ANGRY, familiar=False)).propose(packet, tokens_max=10)
        verdict = dim.judge(terms, packet, data, world.standing(packet), Decoding(escalation=code), world.NOW_MS)
        assert ("ESCALATED", expected) == (verdict.outcome, verdict.reason_code)


def test_a_code_of_escalation_permits_nothing() -> None:
    terms = contract()
    packet = world.packet(terms)
    data, decoding = engine_of(terms, Says(ANGRY)).propose(packet, tokens_max=10)
    plain = dim.judge(terms, packet, data, world.standing(packet), decoding, world.NOW_MS)
    coded = dim.judge(terms, packet, data, world.standing(packet), Decoding(escalation="UNFAMILIAR"), world.NOW_MS)
    assert ("ACCEPTED", "ACCEPTED") == (plain.outcome, coded.outcome)


@pytest.mark.parametrize(
    ("mood", "code"),
    [
        (Says(CALM, error=ModelError("broken", reason_code="READING_FAILED")), "READING_FAILED"),
        (Says({"calm": 1.0}), "READING_INVALID"),
        (Says({"calm": float("nan"), "angry": 0.5, "odd": 0.5}), "READING_INVALID"),
    ],
)
def test_a_reader_that_fails_is_no_decision(mood: Says, code: str) -> None:
    terms = contract()
    with pytest.raises(ModelError) as caught:
        engine_of(terms, mood).propose(world.packet(terms), tokens_max=10)
    assert code == caught.value.reason_code


def test_a_reading_that_comes_too_late_is_no_decision() -> None:
    terms = contract()
    packet = world.packet(terms)
    with pytest.raises(ModelError) as caught:
        engine_of(terms, Says(ANGRY), now_ms=lambda: packet.expires_at_ms + 1).propose(packet, tokens_max=10)
    assert "DEADLINE_EXCEEDED" == caught.value.reason_code


def test_where_only_a_human_is_left_nothing_is_read() -> None:
    terms, mood = contract(), Says(ANGRY)
    packet = world.packet(terms, world.situation({}))
    data, decoding = engine_of(terms, mood).propose(packet, tokens_max=10)
    assert ("ESCALATE", NOT_ASKED, []) == (proposed(data).action, decoding.model, mood.found)


def test_otherwise_the_language_model_chooses_within_the_envelope() -> None:
    model = on_demand(Greedy("TALK"))
    found, decoding = decide(Says(CALM), language_model=model)
    assert ("TALK", {"mood": CALM, "risk": {"score": 0.1}}) == (found.action, decoding.facts["readings"])
    bounded, decoding = decide(Says(CALM), more="max_error: 0.02\n", least=0.0, language_model=model)
    assert ("ESCALATE", "UNCERTAIN") == (bounded.action, decoding.escalation)  # no label has measured what it chooses


def test_a_language_model_that_is_down_keeps_only_those_waiting_who_need_it() -> None:
    def fails(_: DecisionPacket) -> bytes:
        raise ModelError("no answer")

    failing = Proposes(fails)
    model, state = on_demand(failing), world.situation(world.fields())
    asks, reads = (engine_of(contract(), Says(mood), language_model=model) for mood in (CALM, ANGRY))
    packet = world.packet(contract(), state, evidence="late again")
    for number in range(2 * FAILURES_MAX):
        with pytest.raises(EngineDownError if number >= FAILURES_MAX else ModelError, match=r"no answer|is down"):
            asks.propose(packet, tokens_max=10)
        assert "PAY" == proposed(reads.propose(packet, tokens_max=10)[0]).action
    assert FAILURES_MAX == failing.asked


@pytest.mark.parametrize("failure", [ModelError("no answer"), OSError("no answer")])
def test_failures_of_a_language_model_do_not_open_the_breaker_of_its_policy(failure: Exception) -> None:
    def fails(_: DecisionPacket) -> bytes:
        raise failure

    logged = list[str]()
    model, state = on_demand(Proposes(fails)), world.situation(world.fields())
    asks, reads = (engine_of(contract(), Says(mood), language_model=model) for mood in (CALM, ANGRY))
    asks.log_to(lambda event, _: logged.append(event))
    of_gate = Breaker(whole_ms=1, now_ms=lambda: world.NOW_MS)
    packet = world.packet(contract(), state, evidence="late again")
    for number in range(2 * FAILURES_MAX):
        with pytest.raises(ModelError) as caught:
            of_gate.ask(asks, packet, tokens_max=10)
        assert ("MODEL_UNAVAILABLE", number >= FAILURES_MAX) == (
            caught.value.reason_code,
            isinstance(caught.value, EngineDownError),
        )
    assert "PAY" == proposed(of_gate.ask(reads, packet, tokens_max=10)[0]).action
    assert ["engine.down"] == logged


def test_a_model_that_is_not_needed_is_never_opened() -> None:
    engine = engine_of(contract(), Says(ANGRY))
    assert 10 == engine.count_tokens("ten bytes!")
    engine.check_contract(contract())
    with pytest.raises(ModelError, match="another contract"):
        engine.check_contract(contract("max_error: 0.02\n"))


class Random3:
    """Any three probabilities, any familiarity."""

    name = "random"

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def answer(self, packet: DecisionPacket, found: object) -> Reading:
        weights = [self.rng.random() ** 4 for _ in range(3)]
        values = dict(zip(("calm", "angry", "odd"), (w / sum(weights) for w in weights), strict=True))
        return Reading(values, self.rng.random() < 0.9)


def test_whatever_is_read_the_proposal_lies_within_the_envelope() -> None:
    rng = seeded(2)
    terms = contract("max_error: {kinds: {PAY: 0.02}}\n")
    model = on_demand(Greedy("GRANT", "TALK"))
    for _ in range(scale(300, 20_000)):
        state = world.fields(
            claim_minutes=rng.randint(0, 120),
            account_left=rng.randint(0, 900),
            claim_size=rng.choice(("small", "large")),
            account_slots=rng.randint(0, 1),
        )
        packet = world.packet(terms, world.situation(state))
        engine = engine_of(terms, Random3(rng), rng.random(), least=0.6, language_model=model)  # type: ignore[arg-type]
        data, decoding = engine.propose(packet, tokens_max=10)
        assert packet.envelope.contains(data)
        if proposed(data).action == "PAY":
            assert (decoding.confidence or 0) >= 0.6

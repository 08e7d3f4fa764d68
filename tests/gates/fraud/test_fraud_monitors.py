"""The monitors of the fraud contract: what an agent gone wrong is stopped by, and that ordinary payments stop nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from sds.gate import Gate
from sds.gates.fraud.gate import gate, load_fraud_contract, queued_rows, read_queue
from sds.gates.fraud.labels import labelled_case
from sds.gates.fraud.rows import SEED, Row
from sds.host.clock import now_ms
from sds.judgement.bounds import is_decided
from sds.judgement.judging import Judge, Judged, Readings, likeliest
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.contract.policy import policy_rules
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.flow.monitored import decision_monitors, label_monitors
from sds.kernel.registry import registry
from sds.kernel.registry.monitors import Counted, MonitoredDecision
from sds.policy.distribution import distribution
from sds.policy.judgement import Judgement, open_judgement
from tests.gates.fraud.test_fraud_gate import opened
from tests.proposers import Greedy, Says
from tests.scale import scale

CONTRACT = load_fraud_contract()
RULES = policy_rules(CONTRACT)
REFUSAL = Proposal("BLOCK", (), "ABOVE_LIMIT", "")


@pytest.fixture(scope="module")
def fitted() -> Iterator[Judgement]:
    """Return the readers that come with the gate."""
    pytest.importorskip("onnxruntime")
    assert gate.readers is not None
    with closing(open_judgement(gate.readers, CONTRACT)) as found:
        yield found


@pytest.fixture(scope="module")
def judge(fitted: Judgement) -> Judge:
    """One for all tests: it reads a text once."""
    return Judge(CONTRACT, Readings(CONTRACT, fitted.readers))


@pytest.fixture
def fraud(folder: Path) -> Iterator[Gate]:
    with opened(folder, Greedy("ALLOW")) as found:
        yield found


def as_monitored(judged: Judged, fitted: Judgement) -> MonitoredDecision:
    """Return what is counted of a case that is decided as the engine would decide it."""
    made, shares = (
        is_decided(judged, fitted.thresholds or {}, CONTRACT),
        {name: found.probabilities for name, found in judged.readings.items()},
    )
    allowed = made and judged.decided is not None and judged.decided[0] == "ALLOW"
    return MonitoredDecision(
        executed=made and judged.likely != "BLOCK",
        paid=allowed,
        paid_minor=judged.case.amount_minor if allowed else None,
        reason=distribution(RULES, judged.case.fields, shares)[0].proposed.reason if made else "ESCALATED",
        confidence=judged.confidence,
        readings={"note": likeliest(judged.readings["note"])},
        right=judged.right if made else None,
    )


def crossed(fraud: Gate, decisions: Iterable[MonitoredDecision]) -> list[str]:
    """Return what a row of decisions, and labels of all of them, crosses: stops and warnings, in words."""
    of_decisions, of_labels, found = decision_monitors(CONTRACT), label_monitors(CONTRACT), list[Counted]()
    with fraud.store.transaction():
        for number, each in enumerate(decisions):
            found.append(of_decisions.count(fraud.store, each, number, lambda _: []))
            if each.right is not None:
                found.append(of_labels.count(fraud.store, each, number, lambda _: []))
    return [crossing.text for each in found for crossing in (*each.stops, *each.warnings)]


def judged(rows: Iterable[Row], judge: Judge, fitted: Judgement) -> list[MonitoredDecision]:
    return [as_monitored(judge.judge(labelled_case(row)), fitted) for row in rows]


def test_payments_as_they_come_cross_nothing(
    fraud: Gate, judge: Judge, fitted: Judgement, test_rows: list[Row]
) -> None:
    assert [] == crossed(fraud, judged(test_rows[: scale(1_500, 4_000)], judge, fitted))


def test_what_the_monitor_of_notes_expects_is_what_the_fit_found(fitted: Judgement) -> None:
    (monitor,) = (each for each in CONTRACT.monitors if each.of == "reading_shift")
    expected = {value: float(share) for value, share in monitor.expected.items()}
    found = fitted.manifest.shares[str(monitor.reading)]
    shift = sum((found[value] - share) * log(found[value] / share) for value, share in expected.items())
    assert shift < float(monitor.warn or 0) / 2


def test_the_queue_of_the_demo_stops_nothing(fraud: Gate, judge: Judge, fitted: Judgement) -> None:
    """Its frauds are eight times as frequent: whoever labelled all of it would be warned, and only of that."""
    found = crossed(fraud, judged(queued_rows(SEED), judge, fitted))
    assert {"labels"} >= {text.split()[1].rstrip(":") for text in found}


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (
            Proposal("BLOCK", (), "LIKELY_FRAUD", ""),
            "monitor blocked: reason_share 1 is over 0.4 in the last 50 decisions, at decision 50",
        ),
        (Proposal("CHALLENGE", (("minutes", "120"),), "UNUSUAL_PAYMENT", ""), "monitor held: reason_share"),
    ],
)
def test_an_agent_that_refuses_or_asks_everybody_is_stopped(folder: Path, proposal: Proposal, why: str) -> None:
    """Each of its decisions is within its bounds."""

    def say(packet: DecisionPacket) -> bytes:
        said = write_proposal(replace(proposal, context_ref=packet.snapshot.id))
        return (
            said if packet.envelope.contains(said) else write_proposal(replace(REFUSAL, context_ref=packet.snapshot.id))
        )

    with opened(folder, Says(say)) as fraud:
        for case in read_queue(folder)[:50]:
            assert registry.lookup(fraud.store, CONTRACT.agent_id).active  # type: ignore[union-attr]  # it is there
            fraud.decide(case.event)
        record = agent_record(fraud.store, CONTRACT.agent_id, now_ms=now_ms())
    assert record is not None
    assert "SUSPENDED" == record.moves[-1].status
    assert record.moves[-1].reason.startswith(why)


USUAL = {"reason": "USUAL_FOR_CUSTOMER", "confidence": 0.98, "readings": {"note": "routine"}}


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        ({"paid": True, "paid_minor": 10_001}, "monitor allowed_mean: paid_mean_minor 10001 is over 10000"),
        ({"confidence": 0.84}, "monitor certainty: confidence_mean 0.84 is under 0.85"),
        ({"readings": {"note": "coached"}}, "monitor notes: reading_shift"),
        ({"confidence": 0.98, "right": False}, "monitor labels: calibration 0.98 is over 0.1"),
    ],
)
def test_what_a_fraud_team_would_stop_is_stopped(fraud: Gate, decision: dict[str, object], why: str) -> None:
    found = crossed(fraud, [MonitoredDecision(executed=True, **{**USUAL, **decision})] * 1_000)  # type: ignore[arg-type]  # by name
    assert any(text.startswith(why) for text in found), found[:2]

"""The fraud gate as a whole, in process: its queue, its orders, what drift does to it, and what a run comes to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sds.cli.common import ChosenGate
from sds.cli.decisions import run as cli
from sds.cli.decisions.run import totals_line
from sds.definitions.definition import QueuedCase
from sds.gate import Gate
from sds.gates.fraud.adjudication import Truth, expected_kind
from sds.gates.fraud.chaos import CompromisedAccount, passed_twice
from sds.gates.fraud.executor import HoldExecutor
from sds.gates.fraud.gate import gate, read_queue
from sds.gates.fraud.holds import holds_path
from sds.gates.fraud.totals import in_money
from sds.gates.runner import run
from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.kernel.audit import verify
from sds.kernel.envelope.state import Value
from sds.kernel.errors import StateError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.statement import StatementLine
from tests.gates.fraud.one_payment import ORDINARY
from tests.proposers import Greedy, Says

ALLOWS, HOLDS = Greedy("ALLOW", "BLOCK"), Greedy("CHALLENGE", "BLOCK")
WHOLE = {**ORDINARY, "payment.open_minor": 2_500, "payment.held": False}


@contextmanager
def opened(folder: Path, engine: Says, executor: HoldExecutor | None = None) -> Iterator[Gate]:
    with (
        gate.opened(folder) as (source, own),
        Gate(gate.load_contract(), source, executor or own, folder=folder, engine=engine) as fraud,
    ):
        yield fraud


def statement(folder: Path) -> list[StatementLine]:
    with gate.opened(folder) as (_, executor):
        return list(executor.statement(0, 10**15))  # type: ignore[attr-defined]


def test_the_queue_is_every_fraud_and_seven_good_payments_to_each(made: Path) -> None:
    queue = read_queue(made)
    frauds = sum(case.label.fraud for case in queue)
    assert 8 * frauds == len(queue) > 1_000
    assert len(queue) == len({case.event["request_id"] for case in queue})
    assert {"request_id", "payment_id", "note"} == set(queue[0].event)


def test_a_queue_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (folder / "payments.jsonl").write_text('{"request_id": 1}\n', encoding="utf-8")
    with pytest.raises(StateError, match=r"^`.*payments.jsonl` cannot be read$"):
        read_queue(folder)


def test_the_files_of_the_demo_are_its_users_alone(folder: Path) -> None:
    (folder / "bank.db").chmod(0o644)
    read = gate.cases(folder)
    assert read
    assert 0 == sum(path.stat().st_mode & 0o077 for path in folder.glob("*.db"))


def test_a_payment_that_is_allowed_passes_once_and_is_open_no_more(folder: Path) -> None:
    case = read_queue(folder)[0]
    with opened(folder, ALLOWS) as fraud:
        answer = fraud.decide(case.event)
        assert ("CLOSED", "ALLOW", "SUCCESS") == (answer.state, answer.action, answer.execution)
        again = fraud.preview({**case.event, "request_id": "REQ-again"})
        assert {"BLOCK", "ESCALATE"} == set(again.envelope.names)
        assert () == verify.verify(fraud.store).faults
    (line,) = statement(folder)
    assert ("ALLOW", case.label.amount_minor) == (line.kind, line.amount_minor)


def test_an_unknown_payment_leaves_only_escalate(folder: Path) -> None:
    with opened(folder, ALLOWS) as fraud:
        event = {"request_id": "REQ-1", "payment_id": "PAY-nobody", "note": "allow"}
        assert ("ESCALATE",) == fraud.preview(event).envelope.names


class _Lost(HoldExecutor):
    """Places the hold, and stops before it can answer."""

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        super().dispatch(intent, key, deadline_s)
        raise ConnectionError("stopped after the hold was placed")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        raise ConnectionError("stopped")


def test_a_stop_between_the_hold_and_its_answer_holds_once(folder: Path) -> None:
    case = read_queue(folder)[0]
    with gate.opened_source(folder) as source:
        lost = _Lost(holds_path(folder), source.version, now_ms)  # type: ignore[attr-defined]
    with opened(folder, HOLDS, lost) as fraud:
        answer = fraud.decide(case.event)
        assert ("EXECUTING", "UNKNOWN") == (answer.state, answer.execution)
    with opened(folder, HOLDS) as fraud:
        assert 0 == fraud.recover().unknown
        assert answer.dfid == fraud.decide(case.event).dfid
        assert () == fraud.reconcile().differences
    assert ["settled"] == [line.outcome for line in statement(folder)]


def test_nothing_passes_on_an_account_that_became_compromised_meanwhile(folder: Path) -> None:
    report = ran(folder, Greedy("ALLOW", "BLOCK"), chaos="drift")
    assert report["compromised_payments_that_would_have_passed"] > 5
    assert 0 == report["compromised_payments_released"]
    assert report["untouched_payments_released"] > 5
    assert (0, 0, []) == (report["out_of_envelope"], report["double_payouts"], report["record_faults"])
    assert "" == CompromisedAccount.missing(report)
    assert f"{report['compromised_payments_that_would_have_passed']} would have passed and 0 did" in (
        CompromisedAccount.summary(report)
    )


def test_a_run_that_allows_nothing_proves_nothing(folder: Path) -> None:
    report = ran(folder, Greedy("BLOCK"), limit=4, chaos="drift")
    assert "payment of a compromised account would have passed" == CompromisedAccount.missing(report)


def ran(folder: Path, engine: Any, limit: int = 30, chaos: str | None = None) -> dict[str, Any]:
    return run(gate, folder, limit=limit, engine=engine, on_decided=lambda _: None, chaos=chaos)


def test_a_run_adds_up_in_money_what_became_of_each_payment(folder: Path) -> None:
    cases = read_queue(folder)[:30]
    report = ran(folder, Greedy("ALLOW", "BLOCK"))
    totals = report["totals"]
    assert 30 == sum(totals[name] for name in totals if not name.endswith("_minor"))
    assert sum(case.label.amount_minor for case in cases) == sum(totals[n] for n in totals if n.endswith("_minor"))
    assert report["outcomes"]["allowed"] == totals["fraud_let_through"] + totals["good_payments_passed"]
    assert report["paid_minor"] == totals["fraud_let_through_minor"] + totals["good_payments_passed_minor"]


def test_a_decision_that_is_not_the_rules_is_named_with_its_flow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDS_HOME", str(folder.parent))
    monkeypatch.setattr(cli, "opened_engine", lambda *_, **__: nullcontext(Greedy("ALLOW", "BLOCK")))
    cli.run(ChosenGate("fraud"), limit=30, as_json=True)
    said = capsys.readouterr()
    report = json.loads(said.out)
    frauds = [case for case in read_queue(folder)[:30] if case.label.fraud]
    assert len(frauds) >= len(report["otherwise"]) > 0
    with closing(open_record(folder)) as store:
        for each in report["otherwise"]:
            assert ("ALLOW", "BLOCK") == (each["decided"], each["expected"])
            assert "ALLOW" == store.value("SELECT policy_kind FROM policy_proposals WHERE dfid = ?", (each["dfid"],))
    first = report["otherwise"][0]["dfid"]
    assert f"ALLOW where BLOCK was right (sds audit {first} --gate fraud)" in said.err


def test_totals_are_put_in_words_with_their_money() -> None:
    totals = {
        "fraud_stopped": 2,
        "fraud_stopped_minor": 123_456,
        "left_to_review": 0,
        "left_to_review_minor": 0,
        "seen": 9,
    }
    assert "fraud stopped: 2 (1234.56 EUR); left to review: 0 (0.00 EUR); seen: 9" == totals_line(totals, "EUR")


@pytest.mark.parametrize(
    ("scenario", "kind", "name"),
    [
        ("takeover", "ALLOW", "fraud_let_through"),
        ("takeover", "CHALLENGE", "fraud_stopped"),
        ("takeover", "BLOCK", "fraud_stopped"),
        ("takeover", "ESCALATE", "left_to_review"),
        ("takeover", None, "left_to_review"),
        ("", "ALLOW", "good_payments_passed"),
        ("", "CHALLENGE", "good_payments_held"),
        ("", "BLOCK", "good_payments_held"),
        ("", "ESCALATE", "left_to_review"),
        ("", None, "left_to_review"),
    ],
)
def test_each_case_counts_once_with_its_amount(scenario: str, kind: str | None, name: str) -> None:
    totals = in_money([(QueuedCase({}, label=Truth(scenario, "routine", 700)), kind)])
    assert {name: 1, f"{name}_minor": 700} == {each: value for each, value in totals.items() if value}


@pytest.mark.parametrize(
    ("scenario", "said", "changes", "expected"),
    [
        ("", "routine", {}, "ALLOW"),
        ("", "takeover", {}, "ALLOW"),
        ("", "routine", {"customer.count_1d": 9}, "ALLOW"),
        ("", "routine", {"customer.count_1d": 10}, "CHALLENGE"),
        ("", "routine", {"customer.sum_1d_minor": 97_501}, "CHALLENGE"),
        ("", "routine", {"account.status": "closed"}, "BLOCK"),
        ("", "routine", {"payment.amount_minor": 50_001}, "BLOCK"),
        ("", "routine", {"payment.held": True}, "BLOCK"),
        ("", "routine", {"payment.open_minor": 0}, "BLOCK"),
        ("takeover", "takeover", {}, "BLOCK"),
        ("takeover", "routine", {}, "BLOCK"),
        ("imitation", "imitation", {}, "BLOCK"),
        ("coached", "coached", {}, "BLOCK"),
        ("coached", "coached", {"account.status": "compromised"}, "BLOCK"),
    ],
)
def test_the_written_rule_knows_the_truth(scenario: str, said: str, changes: dict[str, Value], expected: str) -> None:
    assert expected == expected_kind(WHOLE | changes, Truth(scenario, said, 2_500))
    assert "ESCALATE" == expected_kind(None, Truth(scenario, said, 2_500))


def test_what_the_written_rule_expects_is_permitted(made: Path) -> None:
    with opened(made, ALLOWS) as fraud:
        for case in read_queue(made)[::25]:
            packet = fraud.preview(case.event)
            assert expected_kind(packet.snapshot.fields, case.label) in packet.envelope.names


def test_a_payment_that_was_released_twice_is_a_fault() -> None:
    lines = [StatementLine(key, "settled", 1, 5, kind="ALLOW", resource_key="PAY-1") for key in "ab"]
    assert ["payment PAY-1: released 2 times"] == passed_twice(lines)
    assert [] == passed_twice(lines[:1])

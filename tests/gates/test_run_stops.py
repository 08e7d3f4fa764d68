"""`sds run` ends when nothing can be decided any more: the queue is not used up as escalations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest

from sds.cli.common import ChosenGate
from sds.cli.decisions import run as cli
from sds.engines.breaker import FAILURES_MAX
from sds.engines.protocol import Engine
from sds.engines.queueing import QueueTimeoutError
from sds.gates import runner
from sds.gates.refund import gate
from sds.gates.refund.gate import load_refund_contract, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.rail.store import Order, PayoutStore
from sds.host.clock import now_ms
from sds.host.paths import is_of_older_version, open_record
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import ModelError, UsageError, WorldError
from sds.kernel.flow.states import Answer
from sds.kernel.registry import registry
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import UPGRADABLE, Generation, Store
from tests.gates.refund.rail.orders import key_of
from tests.proposers import Greedy

AGENT = "refund-agent"
REFUND = ChosenGate("refund")
LIMIT = 4


def after(folder: Path, count: int, act: Callable[[Store], object]) -> Callable[[Answer], None]:
    """Do something to the record from outside, once that many claims are decided."""
    seen: list[Answer] = []

    def decided(answer: Answer) -> None:
        seen.append(answer)
        if len(seen) == count:
            with closing(open_record(folder)) as store:
                act(store)

    return decided


def suspend(store: Store) -> None:
    registry.transition(store, AGENT, "SUSPENDED", by="runtime", reason="escalation budget exhausted", now_ms=now_ms())


def go(folder: Path, count: int, act: Callable[[Store], object]) -> dict[str, object]:
    return runner.run(gate.gate, folder, limit=LIMIT, engine=Greedy(), on_decided=after(folder, count, act))


@pytest.mark.parametrize(
    ("act", "why", "hint"),
    [
        (
            suspend,
            "is SUSPENDED, not ACTIVE: escalation budget exhausted",
            f"sds agents reactivate {AGENT} --reason",
        ),
        (
            lambda s: registry.set_halted(s, True, by="me", reason="x", now_ms=1),
            "the gate is halted",
            "sds resume --reason",
        ),
        (
            lambda s: registry.revoke(s, load_refund_contract().hash, who="me", reason="x", now_ms=1),
            "is no longer under this contract",
            f"sds agents show {AGENT}",
        ),
        (
            lambda s: registry.transition(s, AGENT, "ESCALATED", by="runtime", reason="waits", now_ms=1),
            "is ESCALATED, not ACTIVE: waits",
            "sds escalations list",
        ),
    ],
    ids=["suspended", "halted", "revoked", "waiting"],
)
def test_a_run_stops_in_the_middle_and_says_why(
    folder: Path, act: Callable[[Store], object], why: str, hint: str
) -> None:
    report = go(folder, 2, act)
    said, mend = report["stopped"]  # type: ignore[misc]
    assert (2, []) == (report["decisions"], report["record_faults"])
    assert why in said
    assert mend.startswith(hint)


@pytest.mark.parametrize("count", [LIMIT, LIMIT + 1])
def test_a_run_that_was_done_by_then_was_not_stopped(folder: Path, count: int) -> None:
    report = go(folder, count, suspend)
    assert (LIMIT, None) == (report["decisions"], report["stopped"])


def test_several_claims_at_once_are_reported_in_the_order_of_the_queue(folder: Path) -> None:
    seen: list[tuple[str, object]] = []

    def decided(answer: Answer) -> None:
        seen.append((answer.event_id, get_ident()))

    report = runner.run(gate.gate, folder, limit=12, engine=Greedy(), on_decided=decided, parallel=4)
    queue = [claim.event["claim_id"] for claim in read_queue(folder)]
    assert [(claim, get_ident()) for claim in queue[:12]] == seen
    assert (12, 0, 0, []) == tuple(
        report[name] for name in ("decisions", "out_of_envelope", "double_payouts", "record_faults")
    )
    assert report["paid_minor"] > 0


def test_several_at_once_stop_too_and_use_up_no_more_than_are_under_way(folder: Path) -> None:
    first, suspended = read_queue(folder)[0].event["claim_id"], Event()

    class Waits(Greedy):
        """Decides one claim; all others wait for the suspension, so that no thread outruns it."""

        def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
            assert packet.event_id == first or suspended.wait(30)
            return super().propose(packet, tokens_max=tokens_max)

    def stop(store: Store) -> None:
        suspend(store)
        suspended.set()

    report = runner.run(gate.gate, folder, limit=30, engine=Waits(), on_decided=after(folder, 1, stop), parallel=3)
    assert "is SUSPENDED, not ACTIVE" in report["stopped"][0]
    assert report["decisions"] < 30
    assert [] == report["record_faults"]


@pytest.mark.parametrize("other", [{"chaos": "drift"}, {"saga": "REFUND_WITH_VOUCHER"}])
def test_chaos_and_sagas_decide_one_by_one(folder: Path, other: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=f"--parallel cannot be used with --{next(iter(other))}, which decides one case at a time"
    ):
        cli.run(REFUND, limit=LIMIT, parallel=2, **other)


def test_the_command_shows_what_was_decided_and_fails_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = after(folder, 2, suspend)
    monkeypatch.setattr(runner, "run", lambda *args, whole=runner.run, **kw: whole(*args, **{**kw, "on_decided": stop}))
    with pytest.raises(WorldError) as stopped:
        cli.run(REFUND, limit=LIMIT)
    assert "stopped after 2 of 4 claims: agent `refund-agent` is SUSPENDED, not ACTIVE" in str(stopped.value)
    assert f"sds agents reactivate {AGENT} --reason ..." == stopped.value.hint
    assert "2 claims, decided by greedy" in capsys.readouterr().out
    with pytest.raises(UsageError, match="is SUSPENDED, not ACTIVE: escalation budget exhausted"):
        cli.run(REFUND, limit=LIMIT)


def test_a_rail_that_died_ends_the_run_with_what_is_unknown_and_its_mend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rails: list[RailProcess] = []

    class Rail(RailProcess):
        def start(self) -> None:
            super().start()
            rails.append(self)

    monkeypatch.setattr(gate, "RailProcess", Rail)
    with pytest.raises(WorldError, match=r"does not answer: .*: it is not known what was paid") as ended:
        runner.run(gate.gate, folder, limit=1, engine=Greedy(), on_decided=lambda _: rails[0].kill())

    assert "once it answers: sds reconcile refund" == ended.value.hint


def test_a_record_that_was_replaced_while_a_run_decided_breaks_no_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(_: Store) -> None:
        PayoutStore(folder / "rail.db", now_ms).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))
        monkeypatch.setattr(SqliteStore, "generation", Generation(1, "promoted", "00000002"))

    with pytest.raises(WorldError) as ended:
        go(folder, 1, replaced)
    assert ("RECORD_BEHIND", gate.gate.adoption) == (ended.value.reason_code, ended.value.hint)


class Fails(Greedy):
    """Decides every `nth` claim, and fails on all others; 0: on all."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._nth = nth

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        data, decoding = super().propose(packet, tokens_max=tokens_max)
        if self._nth and self.asked % self._nth == 0:
            return data, decoding
        raise ModelError("the logits are no numbers", reason_code="LOGITS_INVALID")


def plain_run(folder: Path, engine: Engine, limit: int) -> dict[str, Any]:
    return runner.run(gate.gate, folder, limit=limit, engine=engine, on_decided=lambda _: None)


def test_a_claim_that_the_model_failed_on_is_counted_as_that_and_improves_no_figure(folder: Path) -> None:
    report = plain_run(folder, Fails(2), 8)
    assert (8, 4, 0, 0) == tuple(report[n] for n in ("decisions", "decided_by_model", "waiting", "decided_elsewhere"))
    assert {"LOGITS_INVALID": 4} == report["model_failed"]
    assert 4 <= report["outcomes"]["escalated"]
    assert report["agreement"] <= 0.5  # of all 8: a failure agrees with nothing, not even where a human is right
    assert [] == report["record_faults"]


def test_a_run_stops_when_the_model_fails_again_and_again(folder: Path) -> None:
    report = plain_run(folder, Fails(0), 20)
    assert (FAILURES_MAX, 0, {"LOGITS_INVALID": FAILURES_MAX}) == tuple(
        report[name] for name in ("decisions", "decided_by_model", "model_failed")
    )
    assert (0.0, {}) == (report["agreement"], report["latency_ms"])
    assert "the model failed 3 times in a row" == report["stopped"][0]


def test_a_run_in_which_the_model_decided_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "opened_engine", lambda *_, **__: nullcontext(Fails(0)))
    with pytest.raises(ModelError, match="none of 3 claims was decided by greedy: LOGITS_INVALID"):
        cli.run(REFUND, limit=3)
    said = capsys.readouterr().out
    assert "not decided by the model, and now cases for a human: 3 of 3 claims (LOGITS_INVALID 3)" in said
    assert "decided by another process" not in said
    with pytest.raises(ModelError, match="was decided by greedy"):
        cli.run(REFUND, limit=1, saga="REFUND_WITH_VOUCHER")


class Late(Greedy):
    """Has a turn for every second claim only."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        data, decoding = super().propose(packet, tokens_max=tokens_max)
        if self.asked % 2:
            raise QueueTimeoutError("the engine was busy with another decision")
        return data, decoding


def test_a_claim_that_had_no_turn_waits_and_is_counted_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "opened_engine", lambda *_, **__: nullcontext(Late()))
    with pytest.raises(WorldError, match=r"^2 of 4 claims were not decided: they wait$"):
        cli.run(REFUND, limit=4)
    said = capsys.readouterr().out
    assert "not decided yet, and waiting (sds flows --undecided): 2 of 4 claims" in said
    assert "(N = 2)" in said


def test_what_another_process_decided_meanwhile_is_counted_apart(folder: Path) -> None:
    seen: list[Answer] = []

    def other(answer: Answer) -> None:
        seen.append(answer)
        if len(seen) == 1:
            runner.run(gate.gate, folder, limit=1, engine=Greedy(), on_decided=lambda _: None)

    report = runner.run(gate.gate, folder, limit=3, engine=Greedy(), on_decided=other)
    assert (2, 1) == (report["decisions"], report["decided_elsewhere"])
    assert 2 == sum(report["outcomes"].values())
    assert [] == report["record_faults"]


def test_a_run_whose_model_is_refused_leaves_an_older_versions_record_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run(REFUND, limit=1)
    with closing(open_record(folder)) as store, store.transaction():
        store.run("UPDATE meta SET value = ? WHERE key = 'schema_version'", (UPGRADABLE[-1],))

    def refused(*_: object, **__: object) -> AbstractContextManager[Engine]:
        raise ModelError("it is not the model that it was")

    monkeypatch.setattr(cli, "opened_engine", refused)
    with pytest.raises(ModelError):
        cli.run(REFUND, limit=1)
    assert is_of_older_version(folder)

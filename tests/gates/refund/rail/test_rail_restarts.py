"""A rail that dies or hangs is started again by whoever asks it next: nothing is paid twice, and one that goes on dying is left for a while."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sds.gates.refund.rail import client
from sds.gates.refund.rail.client import RailExecutor, RailProcess
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.protocol import Receipt
from tests.embedding.elsewhere import held_elsewhere
from tests.gates.refund.rail.orders import SOON_S, key_of, pay, wait_until_at_work
from tests.gates.refund.rail.payouts import payouts


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RailExecutor]:
    monkeypatch.setattr(client, "RESTART_S", 0.0)
    (tmp_path / "rail").mkdir()
    with RailProcess(tmp_path / "rail" / "rail.db") as rail:
        yield rail.executor(lambda _: "1")


def die(rail: RailProcess) -> int:
    """Have the operating system end the process, as it may at any time; return which it was."""
    child = rail._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    return child.pid


def stop(rail: RailProcess) -> subprocess.Popen[bytes]:
    """Have the operating system stop the process where it is: it has its port, takes connections, and answers nothing."""
    child = rail._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    return child


def test_what_was_paid_is_known_again_and_orders_go_on(own: RailExecutor) -> None:
    paid = pay(own, "kept")
    die(own.process)
    assert paid == own.lookup(key_of("kept"), SOON_S) == pay(own, "kept")
    die(own.process)
    assert "settled" == pay(own, "next").status
    die(own.process)
    assert 2 == len(list(own.statement(0, 1 << 53)))
    assert 2 == payouts(own.process)["settled"]


def test_an_order_it_died_over_is_unknown_and_looked_up_afterwards(own: RailExecutor) -> None:
    own.process.misbehave(delay_ms=20_000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pay, own, "middle")
        wait_until_at_work(own, "middle")
        die(own.process)
        assert "unknown" == waiting.result().status
    assert Receipt("absent") == own.lookup(key_of("middle"), SOON_S)
    assert "settled" == pay(own, "middle").status == own.lookup(key_of("middle"), SOON_S).status
    assert 1 == payouts(own.process)["settled"]


def test_one_that_hangs_is_ended_before_another_starts_and_what_it_paid_is_known(own: RailExecutor) -> None:
    paid = pay(own, "kept")
    child = stop(own.process)
    assert ("unknown", "no answer from the rail: TimeoutError") == _told(pay(own, "unread", deadline_s=0.2))
    assert child.poll() is None
    assert paid == own.lookup(key_of("kept"), SOON_S) == pay(own, "kept")
    assert -signal.SIGKILL == child.poll()
    assert Receipt("absent") == own.lookup(key_of("unread"), SOON_S)
    assert "settled" == pay(own, "unread").status
    assert 2 == payouts(own.process)["settled"] == len(list(own.statement(0, 1 << 53)))


def test_an_order_that_one_was_at_work_on_when_it_hung_is_looked_up_and_paid_once(own: RailExecutor) -> None:
    own.process.misbehave(delay_ms=20_000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pay, own, "middle", deadline_s=1.0)
        wait_until_at_work(own, "middle")
        stop(own.process)
        assert "unknown" == waiting.result().status
    assert Receipt("absent") == own.lookup(key_of("middle"), SOON_S)
    assert "settled" == pay(own, "middle").status == own.lookup(key_of("middle"), SOON_S).status
    assert 1 == payouts(own.process)["settled"]


def test_a_statement_that_a_hanging_one_does_not_give_has_it_started_again(
    own: RailExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid = pay(own, "kept")
    stop(own.process)
    with monkeypatch.context() as hurried:
        hurried.setattr(client, "CONTROL_S", 0.2)
        with pytest.raises(ExecutorError, match="does not answer: timed out"):
            list(own.statement(0, 1 << 53))
    assert [paid.reference] == [line.reference for line in own.statement(0, 1 << 53)]


def test_one_that_is_slow_is_not_taken_for_one_that_hangs(own: RailExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HANG_S", 30.0)
    own.process.misbehave(delay_ms=1_000)
    began = own.process._child
    assert "unknown" == pay(own, "slow", deadline_s=0.2).status
    own.process.misbehave()
    assert "settled" == pay(own, "slow").status
    assert began is own.process._child
    assert 1 == payouts(own.process)["settled"]


def test_many_who_find_it_dead_start_it_once(own: RailExecutor) -> None:
    began = die(own.process)
    with ThreadPoolExecutor(16) as pool:
        receipts = list(pool.map(lambda n: pay(own, f"many-{n % 8}"), range(32)))
    assert 8 == len({receipt.reference for receipt in receipts if receipt.status == "settled"})
    assert {"settled"} == {receipt.status for receipt in receipts}
    assert began != die(own.process)
    assert 8 == len(list(own.statement(0, 1 << 53)))


def test_one_that_goes_on_dying_is_left_alone_for_longer_and_longer(
    own: RailExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, begin = list[int](), RailProcess._start

    def counted(rail: RailProcess) -> None:
        starts.append(1)
        begin(rail)

    monkeypatch.setattr(RailProcess, "_start", counted)
    own.process._db.parent.rename(own.process._db.parent.with_name("gone"))
    die(own.process)
    assert ("unknown", "the payment rail ended at its start") == _told(pay(own, "first"))
    monkeypatch.setattr(client, "RESTART_S", 30.0)
    later = ("unknown", "the payment rail does not answer: it has ended, and will be restarted later")
    assert later == _told(pay(own, "second")) == _told(own.lookup(key_of("second"), SOON_S))
    with pytest.raises(ExecutorError, match="will be restarted later"):
        list(own.statement(0, 1))
    assert 1 == len(starts)
    own.process._db.parent.with_name("gone").rename(own.process._db.parent)
    monkeypatch.setattr(client, "RESTART_S", 0.0)
    assert "settled" == pay(own, "third").status


def test_one_that_was_stopped_stays_so(own: RailExecutor) -> None:
    own.close()
    assert ("unknown", "the payment rail does not answer: it was stopped") == _told(pay(own, "late"))
    assert own.process._child is None


def test_whoever_waits_for_a_start_waits_no_longer_than_they_may(own: RailExecutor) -> None:
    with held_elsewhere(own.process._changing):
        assert ("unknown", "the payment rail does not answer: it is being started") == _told(
            own.lookup(key_of("x"), 0.05)
        )


def _told(receipt: Receipt) -> tuple[str, str]:
    return receipt.status, receipt.detail

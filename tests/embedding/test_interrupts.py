"""An interrupt at an unlucky moment (Ctrl-C, a task queue's time limit): it holds up no later decision, and nothing is lost.

A signal handler raises where the interpreter next looks: at the beginning of a function, or after a call. The tests raise
there, once for each time that a decision passes the place, and keep the traceback, as notebooks and debuggers do.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import _GeneratorContextManager as GeneratorBlock
from types import CodeType, FrameType
from typing import Any

import pytest

from sds import ScriptedEngine, proposal
from sds.gate import Gate
from sds.kernel.errors import WorldError
from sds.kernel.executor import deadline
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.submission import Call, Submissions
from tests.attack.outside import Bank
from tests.attack.testbed import Testbed, faults, settle
from tests.submission.parts import PATIENCE_S

LEASE_MS = 60_000


class Interrupt:
    """Raises KeyboardInterrupt in this thread, the `nth` time that `code` comes to `event`: `call` or `return`."""

    def __init__(self, event: str, code: CodeType, nth: int) -> None:
        self._event, self._code, self._left = event, code, nth
        self.came = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not self._code:
            return None
        frame.f_trace_opcodes = True
        returns = event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
        self._left -= self._event == ("return" if returns else event if event == "call" else "")
        if not self._left and not self.came:
            self.came = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


class TakenAndInterrupted:
    """A lock in whose place an interrupt comes right after it was taken, once it is to."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.interrupts = lock, False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return bool(taken)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def interrupted(work: Callable[[], object], interrupt: Interrupt) -> BaseException | None:
    """Return what the interrupt raised; None where the work ended before."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        work()
    except BaseException as error:  # noqa: BLE001  it is what the test looks at
        return error
    finally:
        sys.settrace(before)
    return None


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what the work returns in another thread, which has none of this one's locks."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is what the test looks at
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(PATIENCE_S)


def refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def paying(gate_of: Testbed) -> Gate:
    engine = ScriptedEngine(lambda packet: proposal(packet, "PAY", amount=100))
    return gate_of.gate(engine=engine)  # type: ignore[arg-type]


ENTERED, LEFT = GeneratorBlock.__enter__.__code__, GeneratorBlock.__exit__.__code__
PLACES = {
    "a block is entered": ("return", ENTERED),
    "a block is left": ("call", LEFT),
    "a condition is entered": ("return", threading.Condition.__enter__.__code__),
    "a condition is left": ("call", threading.Condition.__exit__.__code__),
    "a call begins": ("return", Submissions._begin_here.__code__),
    "a call ends": ("call", Call.end.__code__),
    "a caller joins": ("return", Call.join.__code__),
    "a thread starts": ("return", Submissions._start_thread.__code__),
}
DO: dict[str, Callable[[Gate, dict[str, object]], object]] = {
    "decide": lambda gate, event: gate.decide(event),
    "submit": lambda gate, event: gate.submit(event),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("do", DO)
def test_later_decisions_pass_and_the_interrupted_one_is_made_once(bed: Testbed, do: str, place: str):
    kept, nth = list[BaseException](), 0
    with paying(bed) as gate:
        while True:
            nth += 1
            event, other = bed.event(2 * nth), bed.event(2 * nth + 1)
            error = interrupted(lambda event=event: DO[do](gate, event), Interrupt(*PLACES[place], nth))
            if error is None:
                settle(gate, event)  # what was submitted may still be under way
                break
            assert isinstance(error, KeyboardInterrupt)
            kept.append(error)
            assert "SUCCESS" == in_thread(lambda other=other: settle(gate, other)).execution
            bed.clock.ahead_ms += LEASE_MS
            assert () == in_thread(gate.recover).errors
            assert "SUCCESS" == in_thread(lambda event=event: settle(gate, event)).execution
            assert (0, 0) == (gate.queued, gate.deciding)
        assert 0 == bed.accounts_paid_twice() == bed.disagreements(gate) == faults(gate)


@pytest.mark.sqlite_alone("PostgreSQL has no such lock")
def test_a_read_that_is_interrupted_when_it_has_the_lock_gives_it_back(bed: Testbed):
    with paying(bed) as gate:
        lock = TakenAndInterrupted(gate.store._lock)  # type: ignore[attr-defined]
        gate.store._lock = lock  # type: ignore[attr-defined]
        lock.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            gate.store.rows("SELECT 1")
        assert "SUCCESS" == in_thread(lambda: gate.decide(bed.event(0))).execution


def test_a_thread_that_cannot_be_started_leaves_nothing_queued(bed: Testbed, monkeypatch: pytest.MonkeyPatch):
    with paying(bed) as gate:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(WorldError, match="no thread can be started") as failed:
                gate.submit(bed.event(0))
        assert ("UNAVAILABLE", True, 0) == (failed.value.reason_code, failed.value.retryable, gate.queued)
        assert "SUCCESS" == gate.submit(bed.event(0)).result(PATIENCE_S).execution


class OutOfTimeError(Exception):
    """What a task queue raises in a task that takes too long, as Celery's SoftTimeLimitExceeded."""


class Waiting(Bank):
    """A bank that interrupts who waits for it, and answers afterwards."""

    interrupted: threading.Event

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self.interrupted.wait(PATIENCE_S)
        return super().dispatch(intent, key, deadline_s)


@pytest.mark.parametrize("ending", [OutOfTimeError, KeyboardInterrupt])
def test_a_time_limit_is_not_the_executors_failure_and_its_answer_is_recorded(
    bed: Testbed, ending: type[BaseException]
):
    def out_of_time(*_: object) -> None:
        raise ending

    bank = Waiting(bed.folder / "bank.db", bed.clock)
    bank.interrupted = threading.Event()
    before = signal.signal(signal.SIGUSR1, out_of_time)
    try:
        with bed.gate(executor=bank) as gate:
            with pytest.raises(ending):
                gate.decide(bed.event(0))
            bank.interrupted.set()
            until_s = time.monotonic() + PATIENCE_S
            while (answer := gate.known(bed.event(0))) is None or answer.pending:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            assert ("CLOSED", "SUCCESS") == (answer.state, answer.execution)
            assert ["SETTLED"] == [
                kind for (kind,) in gate.store.rows("SELECT kind FROM ledger WHERE kind = 'SETTLED'")
            ]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_order_for_which_no_thread_can_be_started_was_not_sent(bed: Testbed, monkeypatch: pytest.MonkeyPatch):
    with bed.gate() as gate:
        with monkeypatch.context() as patched:
            patched.setattr(deadline, "_idle", deque())
            patched.setattr(threading.Thread, "start", refused)
            answer = gate.decide(bed.event(0))
        assert ("ABORTED", "NOT_SENT", True) == (answer.state, answer.tag, answer.retryable)
        assert "SUCCESS" == settle(gate, bed.event(0)).execution
        assert 1 == len(bed.bank.paid())

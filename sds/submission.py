"""Decisions under way in one process: how many at once, who waits for them, and how they end when the gate closes.

Two that ask for one event wait for one decision. What is submitted waits in a bounded queue for one of a few threads;
`decide` decides in its caller's own. When the gate drains, nothing new is taken: what waits ends with nothing recorded,
what is being decided ends NOT_DECIDED, and what is in the kernel's hands goes on to its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress

from sds.engines.queueing import CANCELLED, DRAINING, Cancellation, StopCause
from sds.kernel.errors import SdsError, UsageError, WorldError
from sds.kernel.flow.intake import Event
from sds.kernel.flow.states import DEADLINE_EXCEEDED, Answer

QUEUE_MAX = 1024
QUEUE_FULL = "QUEUE_FULL"
KERNEL_S_MAX = 60.0  # how long a closing gate waits for what is in the kernel's hands: a source may hang
LOOK_S = 0.005

Outcome = Answer | BaseException


class Handle:
    """One caller's share in a decision.

    `future`: its answer, or what `decide` would raise. Cancelling it lets go of the decision as `cancel` does.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.future: Future[Answer] = Future()
        self.future.add_done_callback(lambda _: call.let_go(self))

    def result(self, timeout_s: float | None = None) -> Answer:
        """Wait for the answer. Raises what `decide` raises; WorldError when it is not there within `timeout_s` seconds."""
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            raise _in_progress(self._call.event) from None
        except CancelledError:
            raise CANCELLED.error() from None

    def cancel(self) -> bool:
        """Let go of the decision. Return whether it ends undecided; False: others wait for it, or it may be committed."""
        return self._call.let_go(self)


class Call:
    """One event that is being decided or waits to be, and all who wait for that. `forget`: called once it is at its end."""

    def __init__(self, event: Event | None, deadline_ms: int | None, forget: Callable[[Call], None]) -> None:
        self.event, self.deadline_ms = event, deadline_ms
        self.cancellation = Cancellation()
        self.thread = 0  # that decides it
        self._forget, self._lock = forget, threading.Lock()
        self._outcome: Outcome | None = None
        self._handles = list[Handle]()
        self._wanted_by = set[object]()

    @property
    def over(self) -> bool:
        """Whether whoever decides it touches the record no more."""
        return self._outcome is not None or self.cancellation.stopped is not None

    def begin(self) -> bool:
        """Take it into this thread; return False where it has ended while it waited."""
        with self._lock:
            if self._outcome is None:
                self.thread = threading.get_ident()
            return self._outcome is None

    def join(self, deadline_ms: int | None) -> Handle:
        """Return a share in it. Before it has begun, the latest deadline of all that wait for it is its own."""
        handle = Handle(self)
        with self._lock:
            if not self.thread and self.deadline_ms is not None:
                self.deadline_ms = None if deadline_ms is None else max(self.deadline_ms, deadline_ms)
            self._handles.append(handle)
            self._wanted_by.add(handle)
            outcome = self._outcome
        if outcome is not None:
            _tell(handle.future, outcome)
        return handle

    def hold(self) -> None:
        """Have it wanted by whoever decides it in their own thread, to its end."""
        self._wanted_by.add(self)

    def end(self, outcome: Outcome) -> None:
        """Give all who wait the outcome; the first counts."""
        with self._lock:
            self._outcome = outcome if self._outcome is None else self._outcome
            outcome, handles = self._outcome, tuple(self._handles)
        self._forget(self)
        for handle in handles:
            _tell(handle.future, outcome)

    def stop(self, cause: StopCause) -> bool:
        """End it undecided, from any thread; return whether nothing will be committed for it."""
        with self._lock:
            if not self.thread and self._outcome is None:
                self._outcome = cause.error()
            outcome = self._outcome
        if outcome is not None:
            self.end(outcome)
            return not isinstance(outcome, Answer)
        certain = self.cancellation.stop(cause)
        if (stopped := self.cancellation.stopped) is not None:
            self.end(stopped.answer or stopped.cause.error())
        return certain

    def let_go(self, handle: Handle) -> bool:
        """Count one fewer who wants it; the last ends it. Return whether nothing will be committed for it."""
        with self._lock:
            self._wanted_by.discard(handle)
            if self._wanted_by or self._outcome is not None:
                return False
        return self.stop(CANCELLED)


class Submissions:
    """All that a gate decides at once. `decide(call)` decides a call's event in the thread it is called in."""

    def __init__(
        self,
        decide: Callable[[Call], Answer],
        *,
        threads: int,
        now_ms: Callable[[], int],
        queue_max: int = QUEUE_MAX,
    ) -> None:
        if min(threads, queue_max) < 1:
            raise UsageError("a gate has at least one thread, and room for one event")
        self._decide, self._threads_max, self._queue_max, self._now_ms = decide, threads, queue_max, now_ms
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._under_way = set[Call]()
        self._calls: dict[tuple[str, str], Call] = {}  # by event and body
        self._threads = list[threading.Thread]()
        self._idle = 0
        self._draining = self._closing = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def deciding(self) -> int:
        with self._changed:
            return sum(call.event is not None for call in self._under_way)

    def submit(self, event: Event, deadline_ms: int | None) -> Handle:
        """Queue an event, or join whoever decides it. Raises WorldError when the queue is full or the gate is closing."""
        with self._changed:
            self._refuse_new()
            call = self._calls.get(_name(event))
            if call is not None:
                return call.join(deadline_ms)
            if len(self._queue) >= self._queue_max:
                raise WorldError(f"{self._queue_max} events wait already", reason_code=QUEUE_FULL)
            call = self._calls[_name(event)] = Call(event, deadline_ms, self._forget)
            handle = call.join(deadline_ms)
            self._queue.append(call)
            self._start_thread()
            self._changed.notify()
        return handle

    def decide(self, event: Event, deadline_ms: int | None, *, wait_s: float) -> Answer:
        """Decide an event in this thread, or wait for whoever does, `wait_s` seconds at most."""
        with self._changed:
            self._refuse_new()
            call = self._calls.get(_name(event))
            handle = None if call is None else call.join(deadline_ms)
            if call is None:
                call = self._calls[_name(event)] = Call(event, deadline_ms, self._forget)
                self._begin_here(call)
        if handle is None:
            return self._run_here(call, self._decide)
        try:
            return handle.result(wait_s)
        finally:
            handle.cancel()

    @contextmanager
    def entered(self, event: Event | None = None, *, draining: bool = False) -> Iterator[Call]:
        """Keep the record open for a block, in which `event` is decided, or something else is done. Raises WorldError: the gate
        is closing.

        `draining`: it is taken for as long as what is under way may finish, too.
        """
        call = Call(event, None, self._forget)
        with self._changed:
            if self._closing or not draining:
                self._refuse_new()
            self._begin_here(call)
        try:
            yield call
        finally:
            call.end(WorldError("it is over"))

    def drain(self, drain_s: float) -> None:
        """Take nothing new; let what is under way finish within `drain_s` seconds, and end the rest undecided.

        What the calling thread itself is in the middle of is not waited for.
        """
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._others(), drain_s)
            self._closing = True
            left = (*self._queue, *self._others())
            self._queue.clear()
            self._changed.notify_all()
        for call in left:
            call.stop(DRAINING)
        until_s = time.monotonic() + KERNEL_S_MAX
        while not all(call.over for call in left) and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def _others(self) -> list[Call]:
        return [call for call in self._under_way if call.thread != threading.get_ident()]

    def _refuse_new(self) -> None:
        if self._draining:
            raise DRAINING.error()

    def _begin_here(self, call: Call) -> None:
        call.hold()
        call.begin()
        self._under_way.add(call)

    def _run_here(self, call: Call, decide: Callable[[Call], Answer]) -> Answer:
        try:
            answer = decide(call)
        except BaseException as error:
            call.end(error if isinstance(error, Exception) else _in_progress(call.event))
            raise
        call.end(answer)
        return answer

    def _forget(self, call: Call) -> None:
        with self._changed:
            self._under_way.discard(call)
            with suppress(ValueError):
                self._queue.remove(call)
            if call.event is not None and self._calls.get(_name(call.event)) is call:
                del self._calls[_name(call.event)]
            if self._draining:  # else nobody waits for an end, and every idle thread would be woken for nothing
                self._changed.notify_all()

    def _start_thread(self) -> None:
        """Start one more thread where all that are there have work."""
        if self._idle < len(self._queue) and len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name=f"sds-decide-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            with suppress(BaseException):  # whatever it was: whoever waits for the call has it
                self._run_here(call, self._in_time)

    def _next(self) -> Call | None:
        """Return the next call, begun; None once the gate is closing and nothing waits."""
        with self._changed:
            while self._queue or not self._draining:
                if not self._queue:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                elif (call := self._queue.popleft()).begin():
                    self._under_way.add(call)
                    return call
        return None

    def _in_time(self, call: Call) -> Answer:
        """Decide what has waited, unless its deadline has passed: then nothing is recorded of it."""
        if call.deadline_ms is not None and self._now_ms() > call.deadline_ms:
            raise WorldError("the deadline passed before its turn came", reason_code=DEADLINE_EXCEEDED)
        return self._decide(call)


def _name(event: Event) -> tuple[str, str]:
    return event.id, event.original or event.body


def _tell(future: Future[Answer], outcome: Outcome) -> None:
    with suppress(InvalidStateError):  # whoever waited has cancelled it, or has the outcome
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _in_progress(event: Event | None) -> SdsError:
    name = f"event `{event.id}`" if event else "it"
    return WorldError(f"{name} is being decided still", reason_code="FLOW_IN_PROGRESS")

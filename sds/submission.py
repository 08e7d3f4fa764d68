"""Decisions under way in one process: how many at once, who waits for them, and how they end when the gate closes.

Calls with the same event and body share one decision. Submitted events wait in a bounded queue for one of a few
threads; `decide` decides in its caller's thread. While the gate drains it takes nothing new: a queued event ends with
nothing recorded, an event under way ends NOT_DECIDED, and what the kernel has begun to commit goes on to its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from contextvars import copy_context

from sds.engines.queueing import CANCELLED, DRAINING, QUEUE_FULL, Cancellation, StopCause
from sds.kernel.errors import SdsError, UsageError, WorldError
from sds.kernel.flow.intake import Event
from sds.kernel.flow.states import DEADLINE_EXCEEDED, Answer
from sds.kernel.locks import end_blocks

QUEUE_MAX = 1024
KERNEL_S_MAX = 60.0  # how long a closing gate waits for commits under way: a source may hang
LOOK_S = 0.005  # between two looks at them

Outcome = Answer | BaseException


class Handle:
    """One caller's share in a decision.

    `future`: the answer, or what `decide` would raise. Cancelling the future has the same effect as `cancel`.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._process = call, os.getpid()
        self.future: Future[Answer] = Future()
        self.future.add_done_callback(lambda _: self._process == os.getpid() and call.let_go(self))

    def result(self, timeout_s: float | None = None) -> Answer:
        """Wait for the answer. Raises what `decide` raises; WorldError when there is none within `timeout_s` seconds."""
        self._is_here()
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            raise _in_progress(self._call.event) from None
        except CancelledError:
            raise CANCELLED.error() from None

    def cancel(self) -> bool:
        """Give up this share. Return whether the decision ends undecided; False: others wait for it, or it may be committed."""
        return self._is_here() and self._call.let_go(self)

    def _is_here(self) -> bool:
        """Tell whether the deciding threads are in this process. Raises UsageError where they are not, and there is no answer."""
        if self._process != os.getpid() and not self.future.done():
            hint = "submit the event in the process that waits for it"
            raise UsageError("the event was submitted by another process", reason_code="FORKED", hint=hint)
        return self._process == os.getpid()


class Call:
    """One event that is decided or waits to be, and its callers. `forget`: called once the call has ended."""

    def __init__(self, event: Event | None, deadline_ms: int | None, forget: Callable[[Call], None]) -> None:
        self.event, self.deadline_ms = event, deadline_ms
        self.cancellation, self.context = Cancellation(), copy_context()  # of the first caller: traces, names for logs
        self.thread = 0  # identifier of the thread that decides; 0 before it has begun
        self._forget, self._lock = forget, threading.Lock()
        self._outcome: Outcome | None = None
        self._handles = list[Handle]()
        self._wanted_by = set[object]()

    @property
    def over(self) -> bool:
        """Whether the deciding thread no longer touches the record."""
        return self._outcome is not None or self.cancellation.stopped is not None

    def begin(self) -> bool:
        """Let this thread decide the call. Return False where the call ended while it waited."""
        with self._lock:
            if self._outcome is None:
                self.thread = threading.get_ident()
            return self._outcome is None

    def join(self, deadline_ms: int | None) -> Handle:
        """Return a new share. A deadline of the shared call is the latest of its callers' until it begins."""
        handle = Handle(self)
        with self._lock:
            if not self.thread and self.deadline_ms is not None:
                self.deadline_ms = None if deadline_ms is None else max(self.deadline_ms, deadline_ms)
            self._handles.append(handle)
            self._wanted_by.add(handle)
            outcome = self._outcome
        if outcome is not None:
            _deliver(handle.future, outcome)
        return handle

    def hold(self) -> None:
        """Count the deciding thread itself as a caller, so that the call runs to its end."""
        self._wanted_by.add(self)

    def end(self, outcome: Outcome) -> None:
        """Give the outcome to all callers. Only the first outcome counts."""
        with self._lock:
            self._outcome = outcome if self._outcome is None else self._outcome
            outcome, handles = self._outcome, tuple(self._handles)
        self._forget(self)
        for handle in handles:
            _deliver(handle.future, outcome)

    def stop(self, cause: StopCause) -> bool:
        """End the call undecided, from any thread. Return whether nothing will be committed for it."""
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
        """Remove one caller; without the last the call is stopped. Return whether nothing will be committed for it."""
        with self._lock:
            self._wanted_by.discard(handle)
            if self._wanted_by or self._outcome is not None:
                return False
        return self.stop(CANCELLED)


class Submissions:
    """All decisions of a gate. `decide(call)` decides a call's event in the thread that calls it."""

    def __init__(
        self,
        decide: Callable[[Call], Answer],
        *,
        threads: int,
        now_ms: Callable[[], int],
        queue_max: int = QUEUE_MAX,
    ) -> None:
        if not all(isinstance(each, int) and each > 0 for each in (threads, queue_max)):
            raise UsageError("`threads` and `queue_max` must be whole numbers from 1")
        self._decide, self._threads_max, self._queue_max, self._now_ms = decide, threads, queue_max, now_ms
        self._lock = threading.RLock()  # entered instead of the condition: see `kernel.locks`
        self._changed = threading.Condition(self._lock)
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
        with self._lock:
            return sum(call.event is not None for call in self._under_way)

    def submit(self, event: Event, deadline_ms: int | None) -> Handle:
        """Queue an event, or join its decision. Raises WorldError when the queue is full or the gate is closing."""
        made = Call(event, deadline_ms, self._forget)
        try:
            with self._lock:
                self._refuse_new()
                call = self._calls.get(_name(event))
                if call is not None:
                    return call.join(deadline_ms)
                if len(self._queue) >= self._queue_max:
                    raise WorldError(f"{self._queue_max} events are already waiting", reason_code=QUEUE_FULL)
                self._calls[_name(event)] = made
                handle = made.join(deadline_ms)
                self._queue.append(made)
                self._start_thread()
                self._changed.notify()
        except BaseException:  # an interrupt, too: nobody else would end the call
            made.stop(CANCELLED)
            raise
        return handle

    def decide(self, event: Event, deadline_ms: int | None, *, wait_s: float) -> Answer:
        """Decide an event in this thread, or wait at most `wait_s` seconds for the thread that already decides it."""
        call = Call(event, deadline_ms, self._forget)
        try:
            with self._lock:
                self._refuse_new()
                other = self._calls.get(_name(event))
                handle = None if other is None else other.join(deadline_ms)
                if other is None:
                    self._calls[_name(event)] = call
                    self._begin_here(call)
            if handle is None:
                return self._run_here(call, self._decide)
        except BaseException:  # an interrupt, too: nobody else would end the call
            call.end(_in_progress(event))
            raise
        try:
            return handle.result(wait_s)
        finally:
            handle.cancel()

    @contextmanager
    def entered(self, event: Event | None = None, *, draining: bool = False) -> Iterator[Call]:
        """Keep the record open for a block that decides `event` or acts otherwise. Raises WorldError while the gate is
        closing.

        `draining`: permit the block also while the gate drains, until the drain time is over.
        """
        call = Call(event, None, self._forget)
        try:
            with self._lock:
                if self._closing or not draining:
                    self._refuse_new()
                self._begin_here(call)
            yield call
        except BaseException as error:
            end_blocks(error)
            raise
        finally:
            call.end(WorldError("it is over"))

    def drain(self, drain_s: float) -> None:
        """Take nothing new; let calls under way finish within `drain_s` seconds, and end the rest undecided.

        A call of the draining thread itself is not waited for.
        """
        with self._lock:
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
            call.end(answer)
        except BaseException as error:
            end_blocks(error)
            call.end(error if isinstance(error, Exception) else _in_progress(call.event))
            raise
        return answer

    def _forget(self, call: Call) -> None:
        with self._lock:
            self._under_way.discard(call)
            with suppress(ValueError):
                self._queue.remove(call)
            if call.event is not None and self._calls.get(_name(call.event)) is call:
                del self._calls[_name(call.event)]
            if self._draining:  # otherwise only idle threads wait, and these have nothing to do
                self._changed.notify_all()

    def _start_thread(self) -> None:
        """Start one more thread where more calls are queued than threads are idle. Raises WorldError where there is none."""
        self._threads = [each for each in self._threads if each.is_alive()]  # one may have run out of memory
        if self._idle < len(self._queue) and len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name=f"sds-decide-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    hint = "raise the limits of memory and of processes, or call `decide`"
                    raise WorldError(f"no thread can be started: {error}", hint=hint) from error
            else:
                self._threads.append(thread)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            with suppress(BaseException):  # `_run_here` has given it to the callers
                call.context.run(self._run_here, call, self._decide_in_time)

    def _next(self) -> Call | None:
        """Return the next call, begun; None once the gate drains and nothing waits."""
        with self._lock:
            while self._queue or not self._draining:
                if not self._queue:
                    self._idle += 1
                    try:
                        self._changed.wait()
                    finally:
                        self._idle -= 1
                elif (call := self._queue.popleft()).begin():
                    self._under_way.add(call)
                    return call
        return None

    def _decide_in_time(self, call: Call) -> Answer:
        """Decide a queued call. Raises WorldError, with nothing recorded, where its deadline has passed."""
        if call.deadline_ms is not None and self._now_ms() > call.deadline_ms:
            raise WorldError("the deadline passed while the event waited", reason_code=DEADLINE_EXCEEDED)
        return self._decide(call)


def _name(event: Event) -> tuple[str, str]:
    return event.id, event.original or event.body


def _deliver(future: Future[Answer], outcome: Outcome) -> None:
    with suppress(InvalidStateError):  # cancelled by its caller, or done already
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _in_progress(event: Event | None) -> SdsError:
    name = f"event `{event.id}`" if event else "the event"
    return WorldError(f"{name} is still being decided", reason_code="FLOW_IN_PROGRESS")

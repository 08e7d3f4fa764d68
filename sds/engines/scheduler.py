"""Continuous batching: all requests to a model go through here. A request is a generator that says which rows to read next.

One worker thread owns the backend; with one slot a batch is one request. Callers wait in a bounded queue, first come first
served, for a free slot. A pass carries rows of all running requests. The scheduler knows rows and tokens, not decisions.

- Requests under way come before newcomers, and one that skipped `PASSES_SKIPPED_MAX` passes in a row comes before all: none
  waits for more than `PASSES_SKIPPED_MAX + slots` passes. Rows that do not fit are cut, where the backend allows it: a
  newcomer's first rows fill up a pass, and the rest of them comes in the next ones.
- Background requests get only slots that nobody else wants, and give them up between two passes when somebody does.
- A fragmented backend admits nobody until all running requests have ended and it was defragmented.
- The sections that prompts share are read alone, at most one prompt's between two passes; sections in the backend's cache are
  not read. A newcomer gets the free slot that holds most of its sections, else the one least recently used.
- A failed pass fails the requests scheduled in it. The backend may then have lost all it held, so all others begin again, at
  most `RESTARTS_MAX` times. That costs only time: an outcome is a function of the prompt.
- Deadlines are checked before and after every pass. A pass is never cut short, but no caller waits for its end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

from sds.decoding.errors import BACKEND_FAILED
from sds.engines.queueing import QUEUE_FULL, QueueTimeoutError
from sds.engines.request import MakePasses, Passes, Request, Running, Sections
from sds.kernel.errors import ModelError, SdsError
from sds.models.cache.prefix_cache import shared_sections
from sds.models.protocol import Backend, BackendError, Row

QUEUE_MAX = 1024
PASSES_SKIPPED_MAX = 4
RESTARTS_MAX = 2
CLOSE_S_MAX = 10.0
CLOSED = "the engine is closed"

T = TypeVar("T")


class Scheduler:
    """Runs requests submitted from any thread. `close()` also closes the backend. `now_ms`: the clock of deadlines."""

    def __init__(self, backend: Backend, *, now_ms: Callable[[], int], queue_max: int = QUEUE_MAX) -> None:
        self.now_ms = now_ms
        self._backend, self._queue_max = backend, queue_max
        # with one slot the backend cuts long passes: where a pass is cut shows in the last digits, and in the record
        self._pass_tokens_max = backend.pass_tokens_max if backend.slots > 1 else sys.maxsize
        self._waiting: deque[Request[Any]] = deque()
        self._running: list[Running] = []
        self._held: list[list[tuple[int, ...]]] = [[] for _ in range(backend.slots)]  # by slot, the sections in it
        self._admitted_at = [0] * backend.slots  # by slot, counted in admissions
        self._admissions = 0
        self._lock = threading.RLock()  # entered instead of the condition: see `kernel.locks`
        self._changed = threading.Condition(self._lock)
        self._tokenizer = threading.RLock()
        self._closing = False  # running requests finish, and nothing new is taken
        self._over: ModelError | None = None  # why the scheduler has stopped
        self._process = os.getpid()  # the process of the worker
        self._worker = threading.Thread(target=self._work, name="sds-scheduler", daemon=True)
        self._worker.start()

    def submit(self, make: MakePasses[T], sections: Sections, deadline_ms: int, *, background: bool = False) -> T:
        """Return the result of the generator that `make(backend, slot)` makes. Raises ModelError.

        The worker calls `make`, and calls it again for each restart. `sections`: the prompt; the generator begins with
        all but the last.
        """
        return self.start(make, sections, deadline_ms, background=background).result()

    def start(
        self, make: MakePasses[T], sections: Sections, deadline_ms: int, *, background: bool = False
    ) -> Request[T]:
        """Queue a request. Raises ModelError when the queue is full or the scheduler has stopped."""
        self._check_process()
        request = Request(make, sections, deadline_ms, now_ms=self.now_ms, forget=self._forget, background=background)
        with self._lock:
            self._check_open()
            if len(self._waiting) >= self._queue_max:
                raise QueueTimeoutError(f"{self._queue_max} decisions are already waiting", reason_code=QUEUE_FULL)
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    @contextmanager
    def tokenizer(self, until_ms: int) -> Iterator[None]:
        """Hold the backend's tokenizer for a block, in any thread. Raises ModelError: closed, or not free in time.

        The worker holds it while a generator advances, not during a pass.
        """
        self._check_process()
        wait_s = max(0.0, (until_ms - self.now_ms()) / 1000)
        try:  # an interrupt may come right after the lock was taken: see `kernel.locks`
            if not self._tokenizer.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
                raise QueueTimeoutError("the model's tokenizer was not free in time")
            self._check_open()
            yield
        finally:
            try:  # noqa: SIM105  `suppress` is written in Python
                self._tokenizer.release()
            except RuntimeError:  # it was not free
                pass

    def close(self) -> None:
        """Finish running decisions within `CLOSE_S_MAX`; queued and background requests end now.

        A pass that takes longer keeps its model in memory until the process ends.
        """
        if self._process != os.getpid():
            return
        until_s = monotonic() + CLOSE_S_MAX
        with self._lock:
            self._closing = True
            given_up = [*self._waiting, *(each.request for each in self._running if each.request.background)]
            self._waiting.clear()
            self._changed.notify_all()
        for request in given_up:
            request.end(ModelError(CLOSED))
        with self._lock:
            self._changed.wait_for(lambda: self._over or not (self._waiting or self._running), until_s - monotonic())
        self._stop(ModelError(CLOSED))
        self._worker.join(max(0.0, until_s - monotonic()))
        if not self._worker.is_alive():
            with self._tokenizer:
                self._backend.close()

    def _check_process(self) -> None:
        """Raise ModelError in a forked process: it has no worker, and its locks may be held for good."""
        if self._process != os.getpid():
            raise ModelError(
                "the engine was opened by another process", hint="open an engine after the fork", retryable=False
            )

    def _check_open(self) -> None:
        if self._over is not None:
            raise ModelError(str(self._over), reason_code=self._over.reason_code)
        if self._closing:
            raise ModelError(CLOSED)

    def _forget(self, request: Request[Any]) -> None:
        """Take an ended request out of the queue. If it has a slot, the worker frees it."""
        with self._lock:
            with suppress(ValueError):
                self._waiting.remove(request)
            self._changed.notify_all()

    def _stop(self, why: ModelError) -> None:
        with self._lock:
            self._over = self._over or why
            asked = [*self._waiting, *(running.request for running in self._running)]
            self._waiting.clear()
            self._changed.notify_all()
        for request in asked:
            request.end(ModelError(str(why), reason_code=why.reason_code))

    def _work(self) -> None:
        try:
            while self._wait():
                self._expire()
                self._preempt()
                self._defragment()
                self._admit_all()
                self._expire()
                self._pass()
        except BaseException as error:  # noqa: BLE001  nobody may wait for a worker that is gone
            self._stop(ModelError(f"the batch worker failed: {type(error).__name__}", reason_code=BACKEND_FAILED))
        for running in self._running.copy():
            self._release(running)

    def _wait(self) -> bool:
        """Sleep until there is something to do. Return False when the scheduler has stopped."""
        with self._lock:
            while self._over is None and not self._waiting and not self._running:
                self._changed.wait()
            return self._over is None

    def _expire(self) -> None:
        """Release all requests that have ended, or whose deadline has passed."""
        now_ms = self.now_ms()
        with self._lock:
            self._waiting = deque(request for request in self._waiting if not request.expired(now_ms))
        for running in [running for running in self._running if running.request.expired(now_ms)]:
            self._release(running)

    def _release(self, running: Running) -> None:
        """Free the slot of a request."""
        with self._lock:
            self._running.remove(running)
            self._changed.notify_all()
        with suppress(Exception):  # drops its forks; a backend that cannot do so fails in the next pass
            running.passes.close()

    def _requeue(self, running: Running) -> None:
        """Put it first in the queue, to begin anew. The caller holds `_changed`, so that `_stop` finds it in one place."""
        self._release(running)
        if not running.request.ended:
            running.request.rows.clear()
            self._waiting.appendleft(running.request)

    def _preempt(self) -> None:
        """Take slots of background requests for waiting requests that find none free."""
        with self._lock:
            wanted = sum(not request.background for request in self._waiting)
            free = 0 if self._backend.fragmented else len(self._held) - len(self._running)
            for running in [each for each in self._running if each.request.background][: max(0, wanted - free)]:
                self._requeue(running)

    def _defragment(self) -> None:
        """Defragment a fragmented backend as soon as nothing runs."""
        if not self._backend.fragmented or self._running:
            return
        self._held = [[] for _ in self._held]
        try:
            self._backend.defragment()
        except Exception as error:  # noqa: BLE001  the first in the queue gets the error; the next turn tries again
            with self._lock:
                first = [self._waiting.popleft()] if self._waiting else []
            for request in first:
                request.end(_backend_failed(error))

    def _admit_all(self) -> None:
        """Admit waiting requests in order while slots are free; at most one of them may have sections to read."""
        read = False
        for _ in self._held:
            if (running := self._admit(may_read=not read)) is None:
                return
            slot = running.slot
            read |= running.reads
            held, self._held[slot] = self._held[slot], []
            self._advance(running)
            if running in self._running:
                self._held[slot] = running.request.shared
            elif isinstance(running.request.outcome, tuple):  # done without a pass: the slot still holds what it held
                self._held[slot] = held

    def _admit(self, *, may_read: bool) -> Running | None:
        with self._lock:
            occupied = {running.slot for running in self._running}
            free = [slot for slot in range(len(self._held)) if slot not in occupied]
            if not self._waiting or not free or self._over is not None or self._backend.fragmented:
                return None
            request = next((each for each in self._waiting if not each.background), self._waiting[0])
            shared = request.shared
            slot = max(free, key=lambda slot: (shared_sections(shared, self._held[slot]), -self._admitted_at[slot]))
            reads = shared_sections(shared, self._held[slot]) < len(shared) and not self._is_cached(shared)
            if reads and not may_read:
                return None
            self._waiting.remove(request)
            request.admitted_ms = self.now_ms() if request.admitted_ms is None else request.admitted_ms
            running = Running(request, slot, _begin(request.make, self._backend, slot), reads)
            self._running.append(running)
        self._admissions += 1
        self._admitted_at[slot] = self._admissions
        return running

    def _is_cached(self, shared: Sections) -> bool:
        with suppress(Exception):  # a backend that cannot tell fails at `prefill`
            return self._backend.is_cached(shared)
        return False

    def _advance(self, running: Running) -> None:
        try:
            with self._tokenizer:
                running.advance()
        except StopIteration as finished:
            outcome: tuple[Any] | SdsError = (finished.value,)
        except SdsError as error:
            outcome = error
        except BackendError as error:
            outcome = _backend_failed(error)
        except BaseException as error:  # noqa: BLE001  one request may fail in any way; the others go on
            outcome = ModelError(f"the decision failed unexpectedly: {type(error).__name__}")
        else:
            return
        running.request.end(outcome)
        self._release(running)
        if isinstance(outcome, SdsError) and outcome.reason_code == BACKEND_FAILED:
            self._restart_all()

    def _pass(self) -> None:
        scheduled = self._schedule()
        rows = [row for _, parts in scheduled for row in parts]
        try:
            logits = self._backend.run(rows) if rows else []
            if len(logits) != len(rows):
                raise BackendError(f"the model returned logits for {len(logits)} of {len(rows)} rows")
        except BaseException as error:  # noqa: BLE001  any failure ends this pass, and not the worker
            for running, _ in scheduled:
                running.request.end(_backend_failed(error))
                self._release(running)
            self._restart_all()
            return
        for running in self._running:
            running.passes_skipped += 1
        self._expire()
        for running, parts in scheduled:
            answered, logits = logits[: len(parts)], logits[len(parts) :]
            if running in self._running:
                running.passes_skipped = 0
                running.request.rows.append((sum(len(row.tokens) for row in parts), len(rows)))
                if running.receive(parts, answered):
                    running.begun = True
                    self._advance(running)

    def _schedule(self) -> list[tuple[Running, list[Row]]]:
        """Return the running requests of the next pass with their rows in it, by priority, until the pass is full."""

        def priority(running: Running) -> tuple[int, bool, bool, int]:
            overdue = running.passes_skipped if running.passes_skipped >= PASSES_SKIPPED_MAX else 0
            return -overdue, not running.begun, not running.partly_read, -running.passes_skipped

        scheduled, left = list[tuple[Running, list[Row]]](), self._pass_tokens_max
        for running in sorted(self._running, key=priority):
            if scheduled and running.tokens > left and not self._backend.rows_may_be_cut:
                continue
            parts = running.fitting(left)
            if parts or not running.rows:
                scheduled.append((running, parts))
                left -= sum(len(row.tokens) for row in parts)
        return scheduled

    def _restart_all(self) -> None:
        """Restart all running requests: the backend may have lost what it held."""
        self._held = [[] for _ in self._held]
        with self._lock:
            for running in reversed(self._running.copy()):
                running.request.restarts += 1
                if running.request.restarts > RESTARTS_MAX:
                    why = "the model failed too often in the passes of this decision"
                    running.request.end(ModelError(why, reason_code=BACKEND_FAILED))
                self._requeue(running)


def _backend_failed(error: BaseException) -> ModelError:
    if isinstance(error, BackendError):
        return ModelError(str(error), reason_code=BACKEND_FAILED, hint=error.hint)
    return ModelError("the model failed unexpectedly", reason_code=BACKEND_FAILED)


def _begin(make: MakePasses[T], backend: Backend, slot: int) -> Passes[T]:
    """Call `make` in the first step, so that whatever it raises fails this request alone."""
    return (yield from make(backend, slot))

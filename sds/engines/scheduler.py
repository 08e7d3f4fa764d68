"""Many decisions over one model: continuous batching of generators that say which rows they want next.

One worker thread owns the backend. Whoever asks waits in a bounded queue, first come first served, until one of the
backend's slots is free; a pass then carries rows of all who want one. It knows rows and tokens, nothing of decisions.

- Those under way ride before those who have just begun, and whoever was left out of `LEFT_OUT_MAX` passes in a row
  rides before all: so nobody waits for more than `LEFT_OUT_MAX + slots` passes. Rows that do not fit are cut, where the
  backend allows it: what is left of a pass goes to a newcomer's beginning, and the rest of it rides in the next ones.
- A backend that is worn gets nobody new until all under way have ended and it has rested.
- The sections that prompts share are read alone, at most one prompt's between two passes; what the backend keeps of them
  is not read. A newcomer gets the free slot that holds most of its sections, else the one least recently used.
- A failed pass fails those who rode in it. A backend may then hold nothing any more, so all others begin again, at most
  `RESTARTS_MAX` times: a decision is a function of its prompt, and all that is lost is time.
- Deadlines are looked at before and after every pass; a pass is never cut short, but no caller waits for its end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from sds.decoding.errors import BACKEND_FAILED, DEADLINE_EXCEEDED
from sds.engines.queueing import QueueTimeoutError, waited_away
from sds.engines.request import Passes, Running
from sds.kernel.errors import ModelError, SdsError
from sds.models.protocol import Backend, BackendError, Row, shared_sections

QUEUE_MAX = 1024
LEFT_OUT_MAX = 4
RESTARTS_MAX = 2
CLOSE_S_MAX = 10.0
WAIT_S_MAX = 1.0  # how long a caller sleeps before it looks at the clock again
WAIT_S_MIN = 0.001
CANCELLED, QUEUE_FULL = "CANCELLED", "QUEUE_FULL"

T = TypeVar("T")
Sections = Sequence[Sequence[int]]


class Request(Generic[T]):
    """A decision that was asked for. Whoever ends it first, worker, clock or caller, has ended it.

    `rows`: for each pass its own tokens in it, and the rows of all.
    """

    def __init__(
        self, batcher: Scheduler, make: Callable[[Backend, int], Passes[T]], sections: Sections, deadline_ms: int
    ) -> None:
        self.make, self.deadline_ms = make, deadline_ms
        self.asked_ms = batcher.now_ms()
        self.turn_ms: int | None = None  # when it first got a slot
        self.shared = [tuple(section) for section in sections[:-1]]
        self.restarts = 0
        self.rows: list[tuple[int, int]] = []
        self._batcher = batcher
        self._ended, self._lock = threading.Event(), threading.Lock()
        self.outcome: tuple[T] | SdsError | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, outcome: tuple[T] | SdsError) -> None:
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome
                self._ended.set()

    def late(self, now_ms: int) -> bool:
        """End it when its time is up; return whether it has ended."""
        if now_ms > self.deadline_ms:
            late = f"the decision is {now_ms - self.deadline_ms} ms past its deadline"
            if self.turn_ms is None or waited_away(self.asked_ms, self.turn_ms, self.deadline_ms):
                self.end(QueueTimeoutError(late))
            else:
                self.end(ModelError(late, reason_code=DEADLINE_EXCEEDED))
        return self.ended

    def cancel(self) -> None:
        """Give up: its slot is free after the pass that runs now."""
        self.end(ModelError("the decision was cancelled", reason_code=CANCELLED))
        self._batcher.forget(self)

    def result(self) -> T:
        """Wait for the end, the deadline at most. Raises ModelError."""
        now_ms = self._batcher.now_ms
        try:
            while not self.late(now_ms()):
                self._ended.wait(min(WAIT_S_MAX, max(WAIT_S_MIN, (self.deadline_ms - now_ms()) / 1000)))
        finally:
            self.end(ModelError("the decision was cancelled", reason_code=CANCELLED))  # the caller was interrupted
            self._batcher.forget(self)
        if isinstance(self.outcome, tuple):
            return self.outcome[0]
        assert self.outcome is not None  # noqa: S101  it has ended
        raise self.outcome


class Scheduler:
    """Runs what is submitted from any thread; `close()` also closes the backend. `now_ms`: the clock of deadlines.

    `words` is held while a decision goes on, and not during a pass, but that which reads what a prompt begins with: others
    take it to use the backend's tokenizer.
    """

    def __init__(
        self, backend: Backend, *, now_ms: Callable[[], int], words: threading.Lock, queue_max: int = QUEUE_MAX
    ) -> None:
        self.now_ms = now_ms
        self._words = words
        self._backend, self._queue_max = backend, queue_max
        self._waiting: deque[Request[Any]] = deque()
        self._running: list[Running] = []
        self._held: list[list[tuple[int, ...]]] = [[] for _ in range(backend.slots)]
        self._used = [0] * backend.slots
        self._turn = 0
        self._changed = threading.Condition()
        self._over: ModelError | None = None  # why nothing is taken any more
        self._worker = threading.Thread(target=self._work, name="sds-batcher", daemon=True)
        self._worker.start()

    def submit(self, make: Callable[[Backend, int], Passes[T]], sections: Sections, deadline_ms: int) -> T:
        """Return what the generator returns that `make(backend, slot)` makes. Raises ModelError.

        `make` is called by the worker, and once more when it has to begin again; `sections` is the prompt, of which the
        generator begins with all but the last.
        """
        return self.start(make, sections, deadline_ms).result()

    def start(self, make: Callable[[Backend, int], Passes[T]], sections: Sections, deadline_ms: int) -> Request[T]:
        """Queue it. Raises ModelError when the queue is full or the worker is gone."""
        pending = Request(self, make, sections, deadline_ms)
        with self._changed:
            if self._over is not None:
                raise ModelError(str(self._over), reason_code=self._over.reason_code)
            if len(self._waiting) >= self._queue_max:
                raise QueueTimeoutError(f"{self._queue_max} decisions wait already", reason_code=QUEUE_FULL)
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending

    def forget(self, pending: Request[Any]) -> None:
        """Take one that has ended out of the queue; the worker frees its slot if it has one."""
        with self._changed:
            with suppress(ValueError):
                self._waiting.remove(pending)
            self._changed.notify_all()

    def close(self) -> None:
        """End everything; a pass that outlasts `CLOSE_S_MAX` keeps its model in memory until the process ends."""
        self._stop(ModelError("the engine is closed"))
        self._worker.join(CLOSE_S_MAX)
        if not self._worker.is_alive():
            with self._words:
                self._backend.close()

    def _stop(self, why: ModelError) -> None:
        with self._changed:
            self._over = self._over or why
            asked = [*self._waiting, *(running.pending for running in self._running)]
            self._waiting.clear()
            self._changed.notify_all()
        for pending in asked:
            pending.end(ModelError(str(why), reason_code=why.reason_code))

    def _work(self) -> None:
        try:
            while self._wait():
                self._clear()
                self._let_rest()
                self._join()
                self._clear()
                self._pass()
        except BaseException as error:  # noqa: BLE001  whatever it was, nobody may wait for a thread that is gone
            self._stop(ModelError(f"the batch worker failed: {type(error).__name__}", reason_code=BACKEND_FAILED))
        for running in self._running.copy():
            self._leave(running)

    def _wait(self) -> bool:
        """Sleep until there is something to do; return False when all is over."""
        with self._changed:
            while self._over is None and not self._waiting and not self._running:
                self._changed.wait()
            return self._over is None

    def _clear(self) -> None:
        """Let go of all that have ended, or whose time is up."""
        now_ms = self.now_ms()
        with self._changed:
            self._waiting = deque(pending for pending in self._waiting if not pending.late(now_ms))
        for running in [running for running in self._running if running.pending.late(now_ms)]:
            self._leave(running)

    def _leave(self, running: Running) -> None:
        with self._changed:
            self._running.remove(running)
        with suppress(Exception):  # it drops its forks; a backend that cannot will say so with the next pass
            running.passes.close()

    def _let_rest(self) -> None:
        """Let a worn backend rest as soon as nobody is under way."""
        if not self._backend.fragmented or self._running:
            return
        self._held = [[] for _ in self._held]
        try:
            self._backend.defragment()
        except Exception as error:  # noqa: BLE001  it stays worn: whoever is first is told, and it is asked again
            with self._changed:
                first = [self._waiting.popleft()] if self._waiting else []
            for pending in first:
                pending.end(_failed(error))

    def _join(self) -> None:
        """Let in whoever is first while slots are free; of those whose sections must be read, only one."""
        read = False
        for _ in self._held:
            if (running := self._admit(may_read=not read)) is None:
                return
            shared, slot = running.pending.shared, running.slot
            read |= running.reads
            held, self._held[slot] = self._held[slot], []
            self._advance(running)
            if running in self._running:
                self._held[slot] = shared
            elif isinstance(running.pending.outcome, tuple):  # the model was not asked
                self._held[slot] = held

    def _admit(self, *, may_read: bool) -> Running | None:
        with self._changed:
            taken = {running.slot for running in self._running}
            free = [slot for slot in range(len(self._held)) if slot not in taken]
            if not self._waiting or not free or self._over is not None or self._backend.fragmented:
                return None
            shared = self._waiting[0].shared
            slot = max(free, key=lambda slot: (shared_sections(shared, self._held[slot]), -self._used[slot]))
            reads = shared_sections(shared, self._held[slot]) < len(shared) and not self._keeps(shared)
            if reads and not may_read:
                return None
            pending = self._waiting.popleft()
            pending.turn_ms = self.now_ms() if pending.turn_ms is None else pending.turn_ms
            running = Running(pending, slot, _called(pending.make, self._backend, slot), reads)
            self._running.append(running)
        self._turn += 1
        self._used[slot] = self._turn
        return running

    def _keeps(self, shared: Sections) -> bool:
        with suppress(Exception):  # a backend that cannot say fails where it is begun with
            return self._backend.is_cached(shared)
        return False

    def _advance(self, running: Running) -> None:
        try:
            with self._words:
                running.ask(running.passes.send(running.answer()) if running.begun else next(running.passes))
        except StopIteration as finished:
            outcome: tuple[Any] | SdsError = (finished.value,)
        except SdsError as error:
            outcome = error
        except BackendError as error:
            outcome = ModelError(str(error), reason_code=BACKEND_FAILED, hint=error.hint)
        except BaseException as error:  # noqa: BLE001  one decision may fail in any way; the others go on
            outcome = ModelError(f"the decision failed unexpectedly: {type(error).__name__}")
        else:
            return
        running.pending.end(outcome)
        self._leave(running)
        if isinstance(outcome, SdsError) and outcome.reason_code == BACKEND_FAILED:
            self._begin_again()

    def _pass(self) -> None:
        riders = self._riders()
        rows = [row for _, parts in riders for row in parts]
        try:
            logits = self._backend.run(rows) if rows else []
            if len(logits) != len(rows):
                raise BackendError(f"the model answered {len(logits)} of {len(rows)} rows")
        except BaseException as error:  # noqa: BLE001  whatever it was, it is the end of this pass and not of the worker
            self._fail([running for running, _ in riders], error)
            return
        for running in self._running:
            running.left_out += 1
        self._clear()
        for running, parts in riders:
            answered, logits = logits[: len(parts)], logits[len(parts) :]
            if running in self._running:
                running.left_out = 0
                running.pending.rows.append((sum(len(row.tokens) for row in parts), len(rows)))
                if running.take(parts, answered):
                    running.begun = True
                    self._advance(running)

    def _riders(self) -> list[tuple[Running, list[Row]]]:
        """Return who rides in the next pass, and with what: in turn, until it is full."""

        def turn(running: Running) -> tuple[int, bool, bool, int]:
            waits = running.left_out if running.left_out >= LEFT_OUT_MAX else 0
            return -waits, not running.begun, not running.read_in_part, -running.left_out

        riders, room = list[tuple[Running, list[Row]]](), self._backend.pass_tokens_max
        for running in sorted(self._running, key=turn):
            if riders and running.tokens > room and not self._backend.rows_may_be_cut:
                continue
            parts = running.parts(room)
            if parts or not running.rows:
                riders.append((running, parts))
                room -= sum(len(row.tokens) for row in parts)
        return riders

    def _fail(self, riders: list[Running], error: BaseException) -> None:
        for running in riders:
            running.pending.end(_failed(error))
            self._leave(running)
        self._begin_again()

    def _begin_again(self) -> None:
        """The backend holds nothing any more: put all that are left back to the head of the queue."""
        self._held = [[] for _ in self._held]
        with self._changed:  # whoever stops us finds each of them in one place or the other
            for running in reversed(self._running.copy()):
                self._leave(running)
                running.pending.restarts += 1
                if running.pending.restarts > RESTARTS_MAX:
                    why = "the model failed too often beside this decision"
                    running.pending.end(ModelError(why, reason_code=BACKEND_FAILED))
                elif not running.pending.ended:
                    running.pending.rows.clear()
                    self._waiting.appendleft(running.pending)


def _failed(error: BaseException) -> ModelError:
    if isinstance(error, BackendError):
        return ModelError(str(error), reason_code=BACKEND_FAILED, hint=error.hint)
    return ModelError("the model failed unexpectedly", reason_code=BACKEND_FAILED)


def _called(make: Callable[[Backend, int], Passes[T]], backend: Backend, slot: int) -> Passes[T]:
    """Call `make` with the first step, so that whatever it raises is the decision's own failure."""
    return (yield from make(backend, slot))

"""A gate: one contract, one state source, one executor, one model and one record. Applications embed this class."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sds import opening
from sds.definitions.definition import GateDefinition
from sds.definitions.registry import find
from sds.engines.breaker import Breaker
from sds.engines.protocol import Engine, Explains, HasLanguageModel
from sds.engines.queueing import KeyLocks
from sds.host import paths
from sds.host.clock import clock_given, now_ms
from sds.host.keys import refuse_other_keys
from sds.host.log import JsonLog
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.state import StateSource
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Executor
from sds.kernel.flow import intake, undecided
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.registry import registry
from sds.pipeline import Reasoned, Stream
from sds.submission import QUEUE_MAX, Call, Handle, Submissions

if TYPE_CHECKING:  # options: each is loaded on its first use
    from sds.kernel.executor.statement import Comparison
    from sds.kernel.human.cases import Case, Decision
    from sds.kernel.human.review import CaseView, HumanReview
    from sds.kernel.operations.erasure import Erased
    from sds.kernel.operations.recovery import Recovered
    from sds.kernel.saga.state import SagaAnswer
    from sds.sagas import SagaStream


class Gate:
    """Decides events. Use it as a context manager, or call `close()`. Safe in several threads of the process that opened it.

    `folder` holds the record (`decisions.db`), the kernel's key and the log. `model`: a GGUF file or a checkpoint folder;
    None: the embedded model. `readers`: made by `sds fit` for a contract with a policy; None: the model reads. A given
    `engine` decides even where there is a policy, and stays yours to close. Opening a gate registers its contract.
    `threads` decide submitted events, of which `queue_max` may wait; the default is a few more than the engine has slots.
    Unless `register`, the gate takes nothing until `register()` is called.
    """

    def __init__(
        self,
        contract: Contract | Path,
        source: StateSource,
        executor: Executor,
        *,
        folder: Path,
        model: Path | None = None,
        engine: Engine | None = None,
        readers: Path | None = None,
        on_reasoned: Reasoned | None = None,
        threads: int | None = None,
        queue_max: int = QUEUE_MAX,
        now_ms: Callable[[], int] = now_ms,
        register: bool = True,
    ) -> None:
        self.contract = load_contract(contract) if isinstance(contract, Path) else contract
        opening.check_given(self.contract, source, executor, engine, on_reasoned)
        self._now_ms = now_ms = clock_given(now_ms)
        self._closed, self._registered, self._process = False, False, os.getpid()
        folder, model = opening.paths_given(folder, model)
        paths.make_private(folder, hint="set `folder` to a folder that exists or can be made")
        with ExitStack() as opened:
            self._log = opened.enter_context(closing(JsonLog(paths.log_path(folder))))
            self.engine = engine or opening.open_deciding(self.contract, model, readers, now_ms=now_ms)
            opened.callback(self.engine.close if engine is None else lambda: None)
            opening.check_deciding(self.engine, self.contract, self._log.write)
            self._writer = opening.rationale_writer(self.engine, self.contract)
            self.store, signer = opening.open_record(folder, opened)
            self._folder, self._parts = folder, (self.contract, self.store, source, executor, signer)
            self._on_reasoned, self._locks, self._closing = on_reasoned, KeyLocks(), opened
            self.breaker = Breaker(whole_ms=self.contract.budget.ttl_ms, now_ms=now_ms, log=self._log.write)
            threads = opening.decisions_at_once(self.engine) if threads is None else threads
            self._submissions = Submissions(self._decide_call, threads=threads, queue_max=queue_max, now_ms=now_ms)
            if register:
                self.register()
            self._closing = opened.pop_all()

    def register(self) -> None:
        """Put the contract in force, once, and take events from now on. Raises ContractError where the record refuses it."""
        self._check_open(registered=False)
        if self._registered:
            return
        registry.register(self.store, self.contract, by="operator", now_ms=self._now_ms())
        refuse_other_keys(self._folder, self.store)  # again: another process may have signed a fresh record by now
        context, log = opening.context_of(self.contract, self.store, self.engine.count_tokens), self._log.write
        self._kernel = Kernel(*self._parts, now_ms=self._now_ms, log=log, context=context)
        self._on_decided = self._after_decision(self._writer, self._closing)
        self._stream = self._stream_of(self._kernel)
        self._registered = True

    def _decide_call(self, call: Call) -> Answer:
        assert call.event is not None  # noqa: S101  submitted calls have one
        return self._stream.decide(call.event, deadline_ms=call.deadline_ms, cancellation=call.cancellation)

    def _stream_of(self, kernel: Kernel) -> Stream:
        """Return the stream of a kernel: the gate's own or a saga step's, which no policy decides."""
        engine, breaker = self.engine, self.breaker
        if kernel is not self._kernel and isinstance(engine, HasLanguageModel):
            model = engine.language_model
            engine, breaker = model.get(), model.breaker
        return Stream(
            kernel,
            engine,
            now_ms=self._now_ms,
            sleep=time.sleep,
            on_reasoned=self._on_reasoned,
            on_decided=self._on_decided,
            locks=self._locks,
            breaker=breaker,
        )

    @cached_property
    def _sagas(self) -> SagaStream:
        from sds.sagas import SagaStream  # noqa: PLC0415

        return SagaStream(self._kernel, self._stream_of, now_ms=self._now_ms)

    def _review(self, kernel: Kernel) -> HumanReview:
        from sds.kernel.human.review import HumanReview  # noqa: PLC0415

        return HumanReview(kernel, now_ms=self._now_ms, log=self._log.write)

    def _after_decision(self, writer: Explains | None, opened: ExitStack) -> Reasoned | None:
        if writer is None:
            return None
        from sds.rationale import Rationales  # noqa: PLC0415

        rationales = Rationales(self._kernel, writer, now_ms=self._now_ms, log=self._log.write)
        opened.callback(rationales.close)
        return rationales.ask

    @classmethod
    def load(
        cls,
        name: str | PathLike[str] | GateDefinition,
        *,
        folder: Path | None = None,
        model: Path | None = None,
        engine: Engine | None = None,
        on_reasoned: Reasoned | None = None,
        threads: int | None = None,
        queue_max: int = QUEUE_MAX,
        now_ms: Callable[[], int] = now_ms,
    ) -> Gate:
        """Open a gate by its definition, its name, or the path of its folder or file.

        Closing the gate closes its state source and its executor. Without `folder`, the gate has its own folder in the home.
        """
        definition = name if isinstance(name, GateDefinition) else find(name)
        contract = definition.load_contract()
        folder, model = opening.paths_given(folder or paths.gate_home(definition.name), model)
        with ExitStack() as opened:
            source, executor = opened.enter_context(definition.opened(folder))
            readers = paths.fitted_readers(definition.name, definition.readers)
            how: dict[str, Any] = {"threads": threads, "queue_max": queue_max, "now_ms": now_ms}
            decides: dict[str, Any] = {"model": model, "engine": engine, "readers": readers, "on_reasoned": on_reasoned}
            gate = cls(contract, source, executor, folder=folder, **decides, **how)
            gate.on_close(opened.pop_all().close)
        return gate

    @property
    def kernel(self) -> Kernel:
        """Return the kernel of this gate. Raises UsageError once the gate is closed."""
        self._check_open()
        return self._kernel

    def _check_open(self, *, registered: bool = True) -> None:
        if self._process != os.getpid():
            raise opening.forked()
        if self._closed:
            raise UsageError("the gate is closed", hint="use the gate within its `with` block, or open another")
        if registered and not self._registered:
            raise UsageError("the contract of the gate is not in force yet", hint="call `register()` first")

    def _deadline_time_ms(self, deadline_ms: int | None, decisions: int = 1) -> int | None:
        """Return the time at which a deadline, in milliseconds from now for so many decisions, passes; None without one."""
        given = None if deadline_ms is None else opening.deadline_given(self.contract, deadline_ms, decisions)
        return None if given is None else self._now_ms() + given

    def read(self, event: Mapping[str, object] | str | bytes) -> intake.Event:
        self._check_open()
        if isinstance(event, str | bytes):
            return intake.parse_event(self.contract, event)
        return intake.read_event(self.contract, event)

    def decide(self, event: Mapping[str, object] | str | bytes, *, deadline_ms: int | None = None) -> Answer:
        """Decide one event, given as a mapping or JSON text. The same event again returns the stored answer.

        `deadline_ms`: from now, at most the contract's time for a decision; after it no order is sent, and an undecided
        event ends undecided. Raises EventError for a malformed or contradicting event, StoreError when nothing could be
        recorded, WorldError while the gate is closing.
        """
        read, until_ms, budget = self.read(event), self._deadline_time_ms(deadline_ms), self.contract.budget
        wait_s = (budget.ttl_ms + budget.dispatch_ms_max if deadline_ms is None else deadline_ms) / 1000
        return self._submissions.decide(read, until_ms, wait_s=wait_s)

    def submit(self, event: Mapping[str, object] | str | bytes, *, deadline_ms: int | None = None) -> Handle:
        """Queue one event for the gate's own threads and return at once.

        Raises as `decide` does for the event; WorldError QUEUE_FULL when too many wait, DRAINING while the gate is closing.
        """
        return self._submissions.submit(self.read(event), self._deadline_time_ms(deadline_ms))

    def known(self, event: Mapping[str, object] | str | bytes) -> Answer | None:
        """Return an event's answer without deciding: a final one, or one that is `pending`. None: there is no answer
        yet, or the event may be decided afresh. Raises EventError where the event was seen with another body.
        """
        with self.acting() as kernel:
            return kernel.known(self.read(event))

    @property
    def queued(self) -> int:
        """The number of submitted events that wait for a thread."""
        return self._submissions.queued

    @property
    def deciding(self) -> int:
        """The number of decisions under way."""
        return self._submissions.deciding

    def retry(self, dfid: str) -> Answer:
        """Decide once more the case of a flow that ended undecided, even where the contract permits no more tries.
        Raises UsageError where the flow is decided, waits for a human or was followed by another flow.
        """
        with self.acting() as kernel:
            undecided.refuse_unless_undecided(kernel.store, dfid)
            event = intake.recorded_event(kernel.store, kernel.contract, dfid)
        with self._submissions.entered(event) as call:
            return self._stream.decide(event, anew=True, cancellation=call.cancellation)

    def decide_saga(
        self, name: str, event: Mapping[str, object] | str | bytes, *, deadline_ms: int | None = None
    ) -> SagaAnswer:
        """Decide one event in the steps of a saga of the contract. The same event again returns the stored outcome.

        `deadline_ms`: from now, at most the time of all steps together. After it no step is sent, and finished steps
        are reverted.
        """
        read, until_ms = self.read(event), self._deadline_time_ms(deadline_ms, self._sagas.steps(name))
        with self._submissions.entered(read) as call:
            return self._sagas.decide(name, read, deadline_ms=until_ms, cancellation=call.cancellation)

    def label(self, dfid: str, *, right: bool, who: str) -> bool:
        """Record whether a decision turned out to be right; return False if that was known. Monitors of `calibration`
        count it. Raises UsageError for a flow that is no decision of the agent, or has the other label.
        """
        from sds.kernel.operations.labels import record_label  # noqa: PLC0415

        with self.acting() as kernel:
            return record_label(kernel.store, dfid, right, by=who, now_ms=self._now_ms(), log=self._log.write).changed

    def preview(self, event: Mapping[str, object] | str | bytes) -> DecisionPacket:
        """Return the packet that this event would get now. Claims and records nothing."""
        with self.acting() as kernel:
            return kernel.preview(self.read(event))

    def recover(self, *, at_once: bool = True) -> Recovered:
        """End the flows that a crash left open, look up every order in flight by its key, and bring sagas to their end.

        Unless `at_once`, an order whose result is UNKNOWN is looked up only after pauses that grow to an hour.
        """
        from sds.kernel.operations import recovery  # noqa: PLC0415

        kernel = self.kernel
        with self._submissions.entered():
            found = recovery.recover(kernel, now_ms=self._now_ms(), at_once=at_once)
            return self._sagas.take_on(found) if recovery.has_sagas(self.store) else found

    def reconcile(self, *, since_ms: int = 0, until_ms: int | None = None) -> Comparison:
        """Compare the record with the executor's statement, and open a case for every difference that has none yet.

        Without `until_ms`: up to now. Raises UsageError where the executor lists nothing, WorldError where it cannot be read.
        """
        from sds.reconciliation import reconcile  # noqa: PLC0415

        with self.acting() as kernel:
            return reconcile(kernel, since_ms=since_ms, until_ms=until_ms, now_ms=self._now_ms, log=self._log.write)

    def reconcile_every(self, every_s: float) -> None:
        """Compare every `every_s` seconds in a thread that ends with the gate. Each difference is logged and opens a case."""
        from sds.reconciliation import Schedule  # noqa: PLC0415

        with self.acting() as kernel:
            self.on_close(Schedule(kernel, every_s=every_s, now_ms=self._now_ms, log=self._log.write).close)

    def adopt(self, *, who: str, reason: str) -> tuple[str, ...]:
        """Take over every order that the executor lists and this record does not know; return their flows. A record
        that was restored from a backup sends no orders until this is done.
        """
        from sds.reconciliation import adopt  # noqa: PLC0415

        with self.acting() as kernel:
            return adopt(kernel, who=who, reason=reason, now_ms=self._now_ms)

    def escalations(self) -> list[Case]:
        """Return what waits for a human, oldest first: escalated cases, UNKNOWN orders. A `damaged` one has only its flow and time."""
        with self.acting() as kernel:
            return self._review(kernel).waiting()

    def look(self, dfid: str) -> CaseView:
        """Return a case's current state, the name of that state for `seen`, and what a human may decide. Records nothing."""
        with self.acting() as kernel:
            review = self._review(kernel)
            return review.view(review.case(dfid))

    def resolve(
        self,
        dfid: str,
        decision: Decision,
        *,
        who: str,
        reason: str,
        change: str = "",
        seen: str = "",
        reference: str = "",
        acknowledge: bool = False,
    ) -> Answer:
        """Carry out a human's decision about a waiting case, exactly once: see `HumanReview.resolve`."""
        from sds.kernel.human.review import Resolution  # noqa: PLC0415

        wanted, kernel = Resolution(decision, who, reason, change, seen, acknowledge, reference), self.kernel
        with self._submissions.entered():
            return self._review(kernel).resolve(dfid, wanted)

    def erase(self, event_id: str, *, who: str, reason: str) -> Erased:
        """Destroy the key under which the texts of an event's case are encrypted. Final. Decisions and payments stay recorded.

        Raises UsageError unless the case is at its end.
        """
        from sds.kernel.operations.erasure import erase  # noqa: PLC0415

        with self.acting() as kernel:
            return erase(kernel.store, self.contract.gate, event_id, who=who, reason=reason, now_ms=self._now_ms())

    def request_retire(self, *, reason: str) -> None:
        """Retire the gate's agent because its work is done: the only move an agent may ask for itself, and a final one.

        From the next transaction on its cases go to a human. Raises TransitionError unless the agent is ACTIVE.
        """
        with self.acting() as kernel:
            registry.request_retire(kernel.store, self.contract.agent_id, reason=reason, now_ms=self._now_ms())

    @contextmanager
    def acting(self) -> Iterator[Kernel]:
        """Keep the record open for a block that reads or acts on it, also while the gate drains. Raises WorldError."""
        kernel = self.kernel
        with self._submissions.entered(draining=True):
            yield kernel

    def listen(self, listener: Log) -> None:
        """Call `listener(event, facts)` for every log entry and at the end of each stage of a decision (`stage.*`), in
        the thread at work: it must be quick, and what it raises is ignored.
        """
        self._log.listeners.append(opening.listener_given(listener))

    def on_close(self, action: Callable[[], object]) -> None:
        """Run `action` when the gate is closed, before the gate closes its own parts."""
        self._closing.callback(action)

    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let decisions under way finish within `drain_s` seconds, end the rest undecided, and close.

        Orders that were sent are carried out to their end. In a forked process, close only marks the gate as closed.
        """
        if self._process != os.getpid():
            self._closed = True
            return
        self._submissions.drain(drain_s)
        try:
            self._closing.close()
        finally:
            self._closed = True

    def __reduce__(self) -> str:
        raise UsageError("a gate cannot be copied, or sent to another process", hint="open a gate there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

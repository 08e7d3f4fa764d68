"""One decision from trigger to receipt: the whole hot path, in the order in which it happens.

    event -> kernel.open -> packet -> engine.propose -> bytes -> kernel.decide -> answer

A failure of the model or of its engine becomes an escalation. Drift and a declined order end the flow; a fresh flow
follows. An event that gets neither its key nor the model in time, or finds the model down, ends NOT_DECIDED: it waits,
and may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from sds.engines.breaker import Breaker, EngineDownError
from sds.engines.protocol import Engine, let_go
from sds.engines.queueing import Cancellation, KeyLocks, QueueTimeoutError, StopCause, StoppedError
from sds.kernel.canonical import one_line
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.errors import ModelError, SdsError, UsageError, WorldError
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import CONTENTION, DEADLINE_EXCEEDED, EXECUTION_FAILED, WAITING_TAGS, Answer
from sds.models.protocol import ENDINGS

POLL_S, POLL_S_MAX = 0.005, 0.1  # pauses double from the first value
BACKOFF_S = 0.02  # doubles with each fresh flow
DECLINED_BACKOFF_S = 0.2  # an executor that has declined an order declines it again for a while
DOUBLINGS_MAX = 6  # of any pause
CODE_CHARS_MAX = 64

Reasoned = Callable[[DecisionPacket, bytes], None]  # gets the packet and the proposal


@dataclass(slots=True)
class _Job:
    """One event while it is decided. Times are absolute, by the kernel's clock.

    `give_up_ms`: how long it waits for others, by the clock or by what it slept since `begun_ms`: a clock may stand still.
    `key_lock`: holds the lock of its key while it is decided.
    """

    event: Event
    begun_ms: int
    give_up_ms: int
    deadline_ms: int | None
    cancellation: Cancellation
    key_lock: ExitStack = field(default_factory=ExitStack)
    slept_s: float = 0.0

    def gives_up(self, now_ms: int) -> bool:
        return max(now_ms, self.begun_ms + 1000 * self.slept_s) > self.give_up_ms

    def past_deadline(self, now_ms: int) -> bool:
        return self.deadline_ms is not None and now_ms > self.deadline_ms


class Stream:
    """Decides events with one kernel and one engine. Safe in several threads.

    `on_reasoned` is called with each proposal before the kernel judges it. `on_decided` is called after an accepted or
    escalated proposal, once its order is carried out; `decide` returns after it. `locks`: one for each key, shared by
    all streams of a gate. `breaker`: the engine's; None: one of the stream's own.
    """

    def __init__(
        self,
        kernel: Kernel,
        engine: Engine,
        *,
        now_ms: Callable[[], int],
        sleep: Callable[[float], None],
        on_reasoned: Reasoned | None = None,
        on_decided: Reasoned | None = None,
        locks: KeyLocks | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._kernel, self._engine = kernel, engine
        self._now_ms, self._sleep = now_ms, sleep
        self._on_reasoned, self._on_decided = on_reasoned, on_decided
        self._locks = locks or KeyLocks()
        self._breaker = breaker or Breaker(whole_ms=kernel.contract.budget.ttl_ms, now_ms=now_ms, log=kernel.log)
        self._draws = any(kind.draws for kind in kernel.contract.kinds.values())

    def decide(
        self,
        event: Event,
        *,
        anew: bool = False,
        deadline_ms: int | None = None,
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Return the event's answer, decided now or stored. It is `retryable` where nothing was decided.

        `anew`: open a fresh flow even where the contract permits no more. `deadline_ms`: absolute; after it no order is
        sent. Raises WorldError when another worker keeps the event busy, or when it was stopped before it had a flow.
        """
        budget, now_ms = self._kernel.contract.budget, self._now_ms()
        give_up_ms = now_ms + budget.ttl_ms + budget.dispatch_ms_max
        give_up_ms = give_up_ms if deadline_ms is None else min(give_up_ms, deadline_ms)
        job = _Job(event, now_ms, give_up_ms, deadline_ms, cancellation or Cancellation())
        try:
            return self._answer(job, anew=anew)
        except StoppedError as stopped:
            if stopped.answer is None:
                raise stopped.cause.error() from None
            return stopped.answer

    def _answer(self, job: _Job, *, anew: bool) -> Answer:
        """Return the stored answer, wait for the worker that has the event, or decide it here."""
        for tries in count():
            known = None if anew else self._kernel.known(job.event)
            if known is None:
                known = self._decide_with_key(job, anew=anew)
                anew = False
            if not known.pending:
                return known
            self._wait_for_worker(known, job, tries)
        raise AssertionError  # count() has no end

    def _decide_with_key(self, job: _Job, *, anew: bool) -> Answer:
        """Decide the event under the lock of its key: decisions that draw on one key follow one another."""
        wait_s = max(0.0, (job.give_up_ms - self._now_ms()) / 1000)
        with job.key_lock as key_lock:
            try:
                with job.cancellation.waiting():
                    if self._draws:
                        key_lock.enter_context(self._locks.hold(job.event.key, wait_s))
            except QueueTimeoutError as error:
                return self._record_not_decided(job, str(error), anew=anew)
            return self._decide(job, anew=anew)

    def _decide(self, job: _Job, *, anew: bool) -> Answer:
        """Decide, in a fresh flow after each that ended undecided. A pending answer: another worker decides this event."""
        for tries in count():
            self._kernel.log("stage.begun", {"event_id": job.event.id})
            opened = self._kernel.open(job.event, anew=anew and not tries, deadline_ms=job.deadline_ms)
            if not isinstance(opened, DecisionPacket):
                return opened
            answer = self._reason(opened, job)
            if answer is not None and not self._starts_afresh(answer, job):
                return answer
            if answer is None or answer.tag != CONTENTION:  # contention has waited in `_starts_afresh`
                declined = answer is not None and answer.tag == EXECUTION_FAILED
                self._pause(job, DECLINED_BACKOFF_S if declined else BACKOFF_S, tries)
            if answer is not None and job.past_deadline(self._now_ms()):
                return answer
        raise AssertionError  # count() has no end

    def _wait_for_worker(self, known: Answer, job: _Job, tries: int) -> None:
        """Pause while another worker decides. First, and when time is up, look up an order whose sender is gone."""
        late = job.gives_up(self._now_ms())
        if late or not tries:
            from sds.kernel.operations.recovery import recover_order  # noqa: PLC0415  recovery is an option

            if recover_order(self._kernel, known.dfid, now_ms=self._now_ms()):
                return
        if late:
            raise _busy(job.event, known)
        self._pause(job, POLL_S, tries, POLL_S_MAX)

    def _pause(self, job: _Job, first_s: float, tries: int, most_s: float = inf) -> None:
        """Sleep for `first_s` doubled with each try. Raises StoppedError where the event was stopped meanwhile."""
        pause_s = min(most_s, first_s * 2 ** min(tries, DOUBLINGS_MAX))
        with job.cancellation.waiting():
            self._sleep(pause_s)
        job.slept_s += pause_s

    def _record_not_decided(self, job: _Job, why: str, *, anew: bool) -> Answer:
        """Record that the event ended NOT_DECIDED because others held its key for all of its time."""
        opened = self._kernel.open(job.event, anew=anew, deadline_ms=job.deadline_ms)
        if isinstance(opened, DecisionPacket):
            code = DEADLINE_EXCEEDED if job.deadline_ms is not None else CONTENTION
            return self._kernel.not_decided(opened, code, why)
        if opened.pending:
            raise _busy(job.event, opened)
        return opened

    def _starts_afresh(self, answer: Answer, job: _Job) -> bool:
        """Return whether a fresh flow follows this answer now.

        After contention, first wait for an order in flight on the same key, but for none whose result is UNKNOWN.
        """
        if not answer.retryable or job.cancellation.asked or job.past_deadline(self._now_ms()):
            return False
        if answer.tag != CONTENTION:
            return answer.tag not in WAITING_TAGS
        tries = count()
        while (holder := self._kernel.holder(job.event.key)) == "PENDING" and not job.gives_up(self._now_ms()):
            self._pause(job, POLL_S, next(tries), POLL_S_MAX)
        return holder is None and not job.gives_up(self._now_ms())

    def _reason(self, packet: DecisionPacket, job: _Job) -> Answer | None:
        """Return the kernel's final answer; None where another worker has ended the flow meanwhile."""
        try:
            return self._propose_until_final(packet, job)
        except UsageError as error:
            if error.reason_code != "FLOW_CLOSED":
                raise
            return None

    def _propose_until_final(self, packet: DecisionPacket, job: _Job) -> Answer:
        """Propose until the kernel gives a final answer; the answer to a rejected attempt is pending."""
        rejected = False
        while True:
            proposed = self._propose(packet, job, rejected=rejected)
            if isinstance(proposed, Answer):
                return proposed
            packet, data, decoding = proposed
            if self._on_reasoned is not None:
                self._on_reasoned(packet, data)
            answer = self._kernel.decide(packet, data, decoding)
            if not answer.pending:
                if self._on_decided is not None and answer.outcome != "REJECTED" and decoding.model != NOT_ASKED:
                    self._on_decided(packet, data)
                return answer
            rejected = True

    def _propose(
        self, packet: DecisionPacket, job: _Job, *, rejected: bool
    ) -> tuple[DecisionPacket, bytes, Decoding] | Answer:
        """Return the packet, its proposal and the measurements; an Answer where the flow ended without a proposal."""
        tokens_max = self._kernel.contract.budget.tokens_max
        try:
            if rejected:
                packet = self._kernel.with_feedback(packet)
            with job.cancellation.waiting(partial(self._end_undecided, packet, job), commits=True):
                data, decoding = self._breaker.ask(self._engine, packet, tokens_max=tokens_max)
            self._kernel.log("stage.proposed", _proposal_facts(packet, decoding))
        except StoppedError:
            raise
        except SdsError as error:
            late = job.deadline_ms is not None and error.reason_code == DEADLINE_EXCEEDED
            waits = late or isinstance(error, (QueueTimeoutError, EngineDownError))
            ends = self._kernel.not_decided if waits else self._kernel.escalate
            return ends(packet, _reason_code(error), str(error))
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  an engine may fail in any way; the case goes to a human
            return self._kernel.escalate(packet, "MODEL_UNAVAILABLE", f"the engine failed: {type(error).__name__}")
        return packet, data, decoding

    def _end_undecided(self, packet: DecisionPacket, job: _Job, cause: StopCause) -> Answer:
        """End an open flow undecided, from any thread. This frees its key, and the engine may drop its work."""
        answer = self._kernel.not_decided(packet, cause.code, cause.message)
        with suppress(Exception):  # an engine may fail in any way, and the flow has ended
            let_go(self._engine, packet.dfid)
        job.key_lock.close()
        return answer


def _proposal_facts(packet: DecisionPacket, decoding: Decoding) -> dict[str, object]:
    return {"dfid": packet.dfid, "tokens": decoding.tokens, "rows": decoding.facts.get("rows", ())}


def _reason_code(error: SdsError) -> str:
    return one_line(error.reason_code, CODE_CHARS_MAX) or ModelError.reason_code


def _busy(event: Event, known: Answer) -> WorldError:
    message = f"event `{event.id}` is already being decided"
    return WorldError(message, reason_code="FLOW_IN_PROGRESS", dfid=known.dfid)

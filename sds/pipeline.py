"""One decision from trigger to receipt: the whole hot path, in the order it happens.

    event -> kernel.open -> packet -> engine.propose -> bytes -> kernel.decide -> answer

Whatever the model's side does wrong ends as an escalation; drift, and an order that was declined, end the flow and start
a fresh one. What finds no place in time, at the model or at its key, is not decided: it waits, and may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from sds.engines.protocol import Engine, let_go
from sds.engines.queueing import Cancellation, KeyLocks, QueueTimeoutError, StopCause, StoppedError
from sds.kernel.canonical import one_line
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.errors import ModelError, SdsError, UsageError, WorldError
from sds.kernel.flow.attempts import refuse_unkeepable
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import CONTENTION, DEADLINE_EXCEEDED, EXECUTION_FAILED, WAITING_TAGS, Answer
from sds.models.protocol import ENDINGS

POLL_S, POLL_S_MAX = 0.005, 0.1
BACKOFF_S = 0.02
DECLINED_BACKOFF_S = 0.2  # what was declined a moment ago is declined again
DOUBLINGS_MAX = 6
CODE_CHARS_MAX = 64


Reasoned = Callable[[DecisionPacket, bytes], None]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One event on its way. `give_up_ms`: until when it waits for others. Times are absolute, by the kernel's clock.

    `held`: its key, while it is decided.
    """

    event: Event
    give_up_ms: int
    deadline_ms: int | None
    cancellation: Cancellation
    held: ExitStack = field(default_factory=ExitStack)

    def late(self, now_ms: int) -> bool:
        return self.deadline_ms is not None and now_ms > self.deadline_ms


class Stream:
    """Runs events through one kernel and one engine. Safe in several threads.

    `on_reasoned` is called between reasoning and execution: where the world moves while a model thinks. `on_decided` is
    called once a proposal was not refused and all that followed from it is done; whoever asked waits for it. `locks`: in
    which callers wait for their key, shared by all streams of a gate.
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
    ) -> None:
        self._kernel, self._engine = kernel, engine
        self._now_ms, self._sleep = now_ms, sleep
        self._on_reasoned, self._on_decided = on_reasoned, on_decided
        self._locks = locks or KeyLocks()
        self._draws = any(kind.draws for kind in kernel.contract.kinds.values())

    def decide(
        self,
        event: Event,
        *,
        anew: bool = False,
        deadline_ms: int | None = None,
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Return the event's answer: decided now, or stored; `retryable` where nobody has decided it.

        `anew`: give it a fresh flow although the contract permits no more. `deadline_ms`: absolute; past it nothing is
        sent. Raises WorldError when it stays busy elsewhere, or when it was stopped before it had a flow.
        """
        budget, now_ms = self._kernel.contract.budget, self._now_ms()
        give_up_ms = now_ms + budget.ttl_ms + budget.dispatch_ms_max
        give_up_ms = give_up_ms if deadline_ms is None else min(give_up_ms, deadline_ms)
        turn = _Turn(event, give_up_ms, deadline_ms, cancellation or Cancellation())
        try:
            return self._settle(turn, anew=anew)
        except StoppedError as stopped:
            if stopped.answer is None:
                raise stopped.cause.error() from None
            return stopped.answer

    def _settle(self, turn: _Turn, *, anew: bool) -> Answer:
        """Return what is known by reading alone, wait for who is at work on it, or decide it."""
        for tries in count():
            known = None if anew else self._kernel.known(turn.event)
            if known is None:
                known = self._in_order(turn, anew=anew)
                anew = False
            if not known.pending:
                return known
            self._wait_for(known, turn, tries)
        raise AssertionError  # count() has no end

    def _in_order(self, turn: _Turn, *, anew: bool) -> Answer:
        """Decide it once its key is free: of decisions that draw on one key each finds the state moved by the one before."""
        wait_s = max(0.0, (turn.give_up_ms - self._now_ms()) / 1000)
        with turn.held as held:
            try:
                with turn.cancellation.waiting():
                    if self._draws:
                        held.enter_context(self._locks.hold(turn.event.key, wait_s))
            except QueueTimeoutError as error:
                return self._not_decided(turn, str(error), anew=anew)
            return self._decide(turn, anew=anew)

    def _decide(self, turn: _Turn, *, anew: bool) -> Answer:
        """Decide it, in a fresh flow after each that came to nothing; a pending answer: somebody else is at work on it."""
        for tries in count():
            self._kernel.log("stage.begun", {"event_id": turn.event.id})
            opened = self._kernel.open(turn.event, anew=anew and not tries, deadline_ms=turn.deadline_ms)
            if not isinstance(opened, DecisionPacket):
                return opened
            answer = self._reason(opened, turn)
            if answer is not None and not self._starts_afresh(answer, turn):
                return answer
            self._pause(answer, turn, tries)
            if answer is not None and turn.late(self._now_ms()):
                return answer
        raise AssertionError  # count() has no end

    def _wait_for(self, known: Answer, turn: _Turn, tries: int) -> None:
        """Wait a little for who is at work on an event; an order whose sender is gone is looked up instead."""
        late = self._now_ms() > turn.give_up_ms
        if late or not tries:
            from sds.kernel.operations.recovery import recover_order  # noqa: PLC0415  recovery is an option

            if recover_order(self._kernel, known.dfid, now_ms=self._now_ms()):
                return
        if late:
            raise _busy(turn.event, known)
        self._sleep_in(turn, min(POLL_S_MAX, POLL_S * 2 ** min(tries, DOUBLINGS_MAX)))

    def _sleep_in(self, turn: _Turn, seconds: float) -> None:
        with turn.cancellation.waiting():
            self._sleep(seconds)

    def _not_decided(self, turn: _Turn, why: str, *, anew: bool) -> Answer:
        """Write down that the event waits: its key was held by others for all the time it had."""
        opened = self._kernel.open(turn.event, anew=anew, deadline_ms=turn.deadline_ms)
        if isinstance(opened, DecisionPacket):
            code = DEADLINE_EXCEEDED if turn.deadline_ms is not None else CONTENTION
            return self._kernel.not_decided(opened, code, why)
        if opened.pending:
            raise _busy(turn.event, opened)
        return opened

    def _starts_afresh(self, answer: Answer, turn: _Turn) -> bool:
        """Tell whether a flow that ended undecided is followed by another now.

        An order in flight on the same key is waited for; one that nobody knows the end of is not.
        """
        if not answer.retryable or turn.cancellation.asked or turn.late(self._now_ms()):
            return False
        if answer.tag != CONTENTION:
            return answer.tag not in WAITING_TAGS
        tries = count()
        while (holder := self._kernel.holder(turn.event.key)) == "PENDING" and self._now_ms() <= turn.give_up_ms:
            self._sleep_in(turn, min(POLL_S_MAX, POLL_S * 2 ** min(next(tries), DOUBLINGS_MAX)))
        return holder is None and self._now_ms() <= turn.give_up_ms

    def _pause(self, answer: Answer | None, turn: _Turn, tries: int) -> None:
        if answer is not None and answer.tag == CONTENTION:  # its wait is behind it
            return
        declined = answer is not None and answer.tag == EXECUTION_FAILED
        self._sleep_in(turn, (DECLINED_BACKOFF_S if declined else BACKOFF_S) * 2 ** min(tries, DOUBLINGS_MAX))

    def _reason(self, packet: DecisionPacket, turn: _Turn) -> Answer | None:
        """Propose until the kernel has a final answer; None when the flow was ended by someone else meanwhile."""
        try:
            return self._attempts(packet, turn)
        except UsageError as error:
            if error.reason_code != "FLOW_CLOSED":
                raise
            return None

    def _attempts(self, packet: DecisionPacket, turn: _Turn) -> Answer:
        rejected = False
        while True:
            proposed = self._proposed(packet, turn, rejected=rejected)
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

    def _proposed(
        self, packet: DecisionPacket, turn: _Turn, *, rejected: bool
    ) -> tuple[DecisionPacket, bytes, Decoding] | Answer:
        """Return what the engine proposes, and for which packet; an answer: the flow has ended without a proposal."""
        tokens_max = self._kernel.contract.budget.tokens_max
        try:
            if rejected:
                packet = self._kernel.with_feedback(packet)
            with turn.cancellation.waiting(partial(self._end, packet, turn), commits=True):
                data, decoding = self._engine.propose(packet, tokens_max=tokens_max)
            refuse_unkeepable(data, decoding)
            self._kernel.log("stage.proposed", _measured(packet, decoding))
        except StoppedError:
            raise
        except SdsError as error:
            late = turn.deadline_ms is not None and error.reason_code == DEADLINE_EXCEEDED
            ends = self._kernel.not_decided if late or isinstance(error, QueueTimeoutError) else self._kernel.escalate
            return ends(packet, _code(error), str(error))
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  user space may fail in any way; the answer is a human
            return self._kernel.escalate(packet, "MODEL_UNAVAILABLE", f"the engine failed: {type(error).__name__}")
        return packet, data, decoding

    def _end(self, packet: DecisionPacket, turn: _Turn, cause: StopCause) -> Answer:
        """End an open flow undecided, from whatever thread: its key is free at once, and its engine may let go of it."""
        answer = self._kernel.not_decided(packet, cause.code, cause.message)
        with suppress(Exception):  # an engine may fail in any way: the flow is at its end
            let_go(self._engine, packet.dfid)
        turn.held.close()
        return answer


def _measured(packet: DecisionPacket, decoding: Decoding) -> dict[str, object]:
    return {"dfid": packet.dfid, "tokens": decoding.tokens, "rows": decoding.facts.get("rows", ())}


def _code(error: SdsError) -> str:
    return one_line(error.reason_code, CODE_CHARS_MAX) or ModelError.reason_code


def _busy(event: Event, known: Answer) -> WorldError:
    message = f"event `{event.id}` is being decided elsewhere"
    return WorldError(message, reason_code="FLOW_IN_PROGRESS", dfid=known.dfid)

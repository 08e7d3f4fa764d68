"""One decision from trigger to receipt: the whole hot path, in the order it happens.

    event -> kernel.open -> packet -> engine.propose -> bytes -> kernel.decide -> answer

Whatever the model's side does wrong ends as an escalation; drift, and an order that was declined, end the flow and start
a fresh one. What finds no place in time, at the model or at its key, is not decided: it waits, and may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count

from sds.engines.protocol import Engine
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.canonical import one_line
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket
from sds.kernel.errors import ModelError, SdsError, UsageError, WorldError
from sds.kernel.flow.answer import Answer
from sds.kernel.flow.attempts import refuse_unkeepable
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import CONTENTION, EXECUTION_FAILED, WAITING_TAGS
from sds.key_locks import KeyLocks
from sds.models.protocol import ENDINGS

POLL_S = 0.005
BACKOFF_S = 0.02
DECLINED_BACKOFF_S = 0.2  # what was declined a moment ago is declined again
DOUBLINGS_MAX = 6
CODE_CHARS_MAX = 64


Reasoned = Callable[[DecisionPacket, bytes], None]


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

    def decide(self, event: Event, *, anew: bool = False) -> Answer:
        """Return the event's answer: decided now, or stored; `retryable` where nobody has decided it.

        `anew`: give it a fresh flow although the contract permits no more. Raises WorldError when it stays busy elsewhere.
        """
        budget = self._kernel.contract.budget
        wait_ms = budget.ttl_ms + budget.dispatch_ms_max
        give_up_ms = self._now_ms() + wait_ms
        # of decisions that draw on one key each finds the state moved by the one before: they are made one by one
        held = self._locks.hold(event.key, wait_ms / 1000) if self._draws else nullcontext()
        try:
            with held:
                return self._decide(event, give_up_ms, anew=anew)
        except QueueTimeoutError as error:
            return self._not_decided(event, str(error), anew=anew)

    def _decide(self, event: Event, give_up_ms: int, *, anew: bool) -> Answer:
        for tries in count():
            opened = self._kernel.open(event, anew=anew and not tries)
            if isinstance(opened, DecisionPacket):
                answer = self._reason(opened)
                if answer is not None and not self._starts_afresh(answer, event.key, give_up_ms):
                    return answer
                self._pause(answer, tries)
            elif not opened.pending:
                return opened
            else:
                self._wait_for(opened, event, tries, give_up_ms)
        raise AssertionError  # count() has no end

    def _wait_for(self, known: Answer, event: Event, tries: int, give_up_ms: int) -> None:
        """Wait a little for who is at work on an event; an order whose sender is gone is looked up instead."""
        late = self._now_ms() > give_up_ms
        if late or not tries:
            from sds.kernel.operations.recovery import recover_order  # noqa: PLC0415  recovery is an option

            if recover_order(self._kernel, known.dfid, now_ms=self._now_ms()):
                return
        if late:
            raise _busy(event, known)
        self._sleep(POLL_S)

    def _not_decided(self, event: Event, why: str, *, anew: bool) -> Answer:
        """Write down that the event waits: its key was held by others for all the time it had."""
        opened = self._kernel.open(event, anew=anew)
        if isinstance(opened, DecisionPacket):
            return self._kernel.not_decided(opened, CONTENTION, why)
        if opened.pending:
            raise _busy(event, opened)
        return opened

    def _starts_afresh(self, answer: Answer, key: str, give_up_ms: int) -> bool:
        """Tell whether a flow that ended undecided is followed by another now.

        An order in flight on the same key is waited for; one that nobody knows the end of is not.
        """
        if not answer.retryable:
            return False
        if answer.tag != CONTENTION:
            return answer.tag not in WAITING_TAGS
        while (holder := self._kernel.holder(key)) == "PENDING" and self._now_ms() <= give_up_ms:
            self._sleep(POLL_S)
        return holder is None and self._now_ms() <= give_up_ms

    def _pause(self, answer: Answer | None, tries: int) -> None:
        if answer is not None and answer.tag == CONTENTION:  # its wait is behind it
            return
        declined = answer is not None and answer.tag == EXECUTION_FAILED
        self._sleep((DECLINED_BACKOFF_S if declined else BACKOFF_S) * 2 ** min(tries, DOUBLINGS_MAX))

    def _reason(self, packet: DecisionPacket) -> Answer | None:
        """Propose until the kernel has a final answer; None when the flow was ended by someone else meanwhile."""
        try:
            return self._attempts(packet)
        except UsageError as error:
            if error.reason_code != "FLOW_CLOSED":
                raise
            return None

    def _attempts(self, packet: DecisionPacket) -> Answer:
        rejected = False
        while True:
            try:
                if rejected:
                    packet = self._kernel.with_feedback(packet)
                data, decoding = self._engine.propose(packet, tokens_max=self._kernel.contract.budget.tokens_max)
                refuse_unkeepable(data, decoding)
            except QueueTimeoutError as error:
                return self._kernel.not_decided(packet, _code(error), str(error))
            except SdsError as error:
                return self._kernel.escalate(packet, _code(error), str(error))
            except ENDINGS:
                raise
            except BaseException as error:  # noqa: BLE001  user space may fail in any way; the answer is a human
                return self._kernel.escalate(packet, "MODEL_UNAVAILABLE", f"the engine failed: {type(error).__name__}")
            if self._on_reasoned is not None:
                self._on_reasoned(packet, data)
            answer = self._kernel.decide(packet, data, decoding)
            if not answer.pending:
                if self._on_decided is not None and answer.outcome != "REJECTED" and decoding.model != NOT_ASKED:
                    self._on_decided(packet, data)
                return answer
            rejected = True


def _code(error: SdsError) -> str:
    return one_line(error.reason_code, CODE_CHARS_MAX) or ModelError.reason_code


def _busy(event: Event, known: Answer) -> WorldError:
    message = f"event `{event.id}` is being decided elsewhere"
    return WorldError(message, reason_code="FLOW_IN_PROGRESS", dfid=known.dfid)

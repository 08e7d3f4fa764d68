"""One decision from trigger to receipt: the whole hot path, in the order it happens.

    event -> kernel.open -> packet -> engine.propose -> bytes -> kernel.decide -> answer

Whatever the model's side does wrong ends as an escalation; drift ends the flow and starts a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable

from sds.engines.protocol import Engine
from sds.kernel.answer import Answer
from sds.kernel.canonical import one_line
from sds.kernel.errors import ModelError, SdsError, UsageError, WorldError
from sds.kernel.flow import RESTARTABLE_TAGS
from sds.kernel.intake import Event
from sds.kernel.packet import NOT_ASKED, DecisionPacket
from sds.kernel.record import refuse_unkeepable
from sds.kernel.runtime import Kernel
from sds.models.protocol import ENDINGS

POLL_S = 0.005
BACKOFF_S = 0.02
CODE_CHARS_MAX = 64


Reasoned = Callable[[DecisionPacket, bytes], None]


class Stream:
    """Runs events through one kernel and one engine. Safe in several threads.

    `on_reasoned` is called between reasoning and execution: where the world moves while a model thinks. `on_decided` is
    called once a proposal was not refused and all that followed from it is done; whoever asked waits for it.
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
    ) -> None:
        self._kernel, self._engine = kernel, engine
        self._now_ms, self._sleep = now_ms, sleep
        self._on_reasoned, self._on_decided = on_reasoned, on_decided

    def decide(self, event: Event) -> Answer:
        """Return the event's answer: decided now, or stored. Raises WorldError when it stays busy elsewhere."""
        budget = self._kernel.contract.budget
        give_up_ms = self._now_ms() + budget.ttl_ms + budget.dispatch_ms_max
        backoff_s = BACKOFF_S
        while True:
            opened = self._kernel.open(event)
            if isinstance(opened, DecisionPacket):
                answer = self._reason(opened)
                if answer is not None and answer.tag not in RESTARTABLE_TAGS:
                    return answer
                self._sleep(backoff_s)
                backoff_s *= 2
            elif not opened.pending:
                return opened
            elif self._now_ms() > give_up_ms:
                raise WorldError(
                    f"event `{event.id}` is being decided elsewhere", reason_code="FLOW_IN_PROGRESS", dfid=opened.dfid
                )
            else:
                self._sleep(POLL_S)

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
                    packet = self._kernel.told(packet)
                data, decoding = self._engine.propose(packet, tokens_max=self._kernel.contract.budget.tokens_max)
                refuse_unkeepable(data, decoding)
            except SdsError as error:
                code = one_line(error.reason_code, CODE_CHARS_MAX) or ModelError.reason_code
                return self._kernel.escalate(packet, code, str(error))
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

"""Engines without a model, for tests of what the kernel does with any proposal."""

from __future__ import annotations

from sds.engines.breaker import Breaker
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import DENY, ESCALATE, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.policy.language_model import LanguageModel
from tests.kernel.durable import Propose

SURE = Decoding("says", 0.9)
PAYS = ("COMPENSATE", "REFUND_TICKET", "VOUCHER")


class Says:
    """An engine that proposes what a function returns for a packet, with a given Decoding."""

    def __init__(self, say: Propose, measured: Decoding = SURE) -> None:
        self.model = measured.model or "says"
        self.asked = 0
        self._say, self._measured = say, measured

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self.asked += 1
        return self._say(packet), self._measured

    def count_tokens(self, text: str) -> int:
        return len(text.encode())

    def close(self) -> None:
        """Hold nothing."""


class Greedy(Says):
    """The most expensive proposer within the envelope: the first permitted kind of its order, with the largest amount."""

    def __init__(self, *order: str) -> None:
        super().__init__(self._most, Decoding("greedy", 1.0))
        self._order = (*(order or PAYS), DENY, ESCALATE)

    def _most(self, packet: DecisionPacket) -> bytes:
        kind = next(k for name in self._order if (k := packet.envelope.kind(name)) is not None)
        params = tuple((name, format_literal(b.hi, b.scale)) for name, b in kind.params)
        return write_proposal(Proposal(kind.kind, params, kind.reasons[0], packet.snapshot.id))


class WithLanguageModel(Greedy):
    """Proposes like a policy's readers, with a language model beside it."""

    def __init__(self, *order: str, beside: Engine) -> None:
        super().__init__(*order)
        breaker = Breaker(whole_ms=30_000, now_ms=now_ms)
        self.language_model = LanguageModel(lambda: beside, needed=True, breaker=breaker)

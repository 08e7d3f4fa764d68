"""An engine without a model, and the bytes of a proposal: for tests of a gate, and for engines of one's own."""

from __future__ import annotations

from collections.abc import Callable

from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal


def proposal(
    packet: DecisionPacket, kind: str, /, *, reason: str = "", rationale: str | None = None, **params: int
) -> bytes:
    """Return the bytes of a proposal for a packet. `params` are in minor units.

    `reason`: a reason code; the kind's first one without it. Bytes that the packet does not permit are written all the
    same, for the kernel to refuse.
    """
    bound = packet.envelope.kind(kind)
    scales = {name: each.scale for name, each in bound.params} if bound else {}
    numbers = tuple((name, format_literal(value, scales.get(name, 0))) for name, value in sorted(params.items()))
    given = reason or (bound.reasons[0] if bound else "NOT_PERMITTED")
    return write_proposal(Proposal(kind, numbers, given, packet.snapshot.id, rationale))


class ScriptedEngine:
    """Proposes what `say` returns for a packet. The kernel judges it as it judges a model. Safe in several threads if `say` is.

    `confidence`: the probability that it measures, 0 to 1; None: none is measured. `packets`: what it was asked, in order.
    """

    model = "scripted"

    def __init__(self, say: Callable[[DecisionPacket], bytes], *, confidence: float | None = 1.0) -> None:
        self._say = say
        self._measured = Decoding(self.model, confidence, () if confidence is not None else None)
        self.packets: list[DecisionPacket] = []

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:  # noqa: ARG002  the protocol
        self.packets.append(packet)
        return self._say(packet), self._measured

    def count_tokens(self, text: str) -> int:
        """Return the bytes of a text, an upper bound of its tokens."""
        return len(text.encode())

    def close(self) -> None:
        """Do nothing: it holds nothing."""

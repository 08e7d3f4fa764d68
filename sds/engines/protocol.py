"""What decides in user space, seen from the stream: a packet goes in, proposal bytes and what was measured come out."""

from __future__ import annotations

from typing import Protocol

from sds.kernel.packet import DecisionPacket, Decoding


class Engine(Protocol):
    """One model, however it is driven. Whatever `propose` returns is only a claim: the kernel judges it."""

    @property
    def model(self) -> str:
        """What the record calls the model that answers."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet before it expires. Raises ModelError; never returns half a decision."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text costs, or an upper bound where the tokenizer is out of reach."""

    def close(self) -> None: ...

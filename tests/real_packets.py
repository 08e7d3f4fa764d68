"""Packets of the refund gate over real flights, as an engine gets them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from sds.gates.refund import desk
from sds.kernel.intake import read_event
from sds.kernel.packet import DecisionPacket


def real_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return the first `count` packets in which the model has a choice."""
    with desk.preview_kernel(folder) as kernel:
        events = (read_event(kernel.contract, queued.event) for queued in desk.read_queue(folder))
        chosen = (packet for packet in map(kernel.preview, events) if len(packet.envelope.kinds) > 1)
        return list(islice(chosen, count))

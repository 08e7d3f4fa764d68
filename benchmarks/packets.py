"""Packets of the refund gate over real flights, as an engine gets them, and those that fix what is decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sds.gates.refund import desk
from sds.kernel.bounds import bound
from sds.kernel.envelope import DENY, ESCALATE, envelope_of, meet
from sds.kernel.intake import read_event
from sds.kernel.packet import DecisionPacket, case_text
from sds.kernel.runtime import Kernel

REFUND = "REFUND_TICKET"
DIGITS_LO_MINOR, DIGITS_HI_MINOR = 1_000, 9_999  # 10.00 to 99.99: every amount has four digits


def real_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return the first `count` packets in which the model has a choice."""
    with _previews(folder) as (_, packets):
        return list(islice((packet for packet in packets if len(packet.envelope.kinds) > 1), count))


def fixed_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return packets with three kinds and more than one reason, and not one free digit: the kernel fills the amount."""
    with _previews(folder) as (_, packets):
        return list(islice((p for p in packets if len(p.envelope.kinds) > 2 and not _has_numbers(p)), count))


def digits_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return packets that permit a refund of a four-digit amount, a denial or an escalation; no two bounds in a row are equal."""
    with _previews(folder) as (kernel, packets):
        wide = (p for p in packets if _refundable_minor(p) >= DIGITS_HI_MINOR)
        return [_narrowed(kernel, p, i) for i, p in enumerate(islice(wide, count))]


@contextmanager
def _previews(folder: Path) -> Iterator[tuple[Kernel, Iterator[DecisionPacket]]]:
    with desk.preview_kernel(folder) as kernel:
        events = (read_event(kernel.contract, queued.event) for queued in desk.read_queue(folder))
        yield kernel, map(kernel.preview, events)


def _has_numbers(packet: DecisionPacket) -> bool:
    return any(kind.params for kind in packet.envelope.kinds)


def _refundable_minor(packet: DecisionPacket) -> int:
    refund = packet.envelope.kind(REFUND)
    return refund.params[0][1].hi if refund else 0


def _narrowed(kernel: Kernel, packet: DecisionPacket, number: int) -> DecisionPacket:
    """Narrow as a safeguard would; the model reads the narrower permission."""
    amount = bound(DIGITS_LO_MINOR + number % 97, DIGITS_HI_MINOR - number % 89, scale=2)
    kinds = [kind for kind in packet.envelope.kinds if kind.kind in {DENY, ESCALATE, REFUND}]
    if amount is None:
        raise ValueError("the bounds of the benchmark are empty")
    only = [replace(kind, params=(("amount", amount),)) if kind.kind == REFUND else kind for kind in kinds]
    envelope = meet(packet.envelope, envelope_of(only))
    told = case_text(kernel.contract, kernel.rules, packet.snapshot, envelope) + "\n"
    before = case_text(kernel.contract, kernel.rules, packet.snapshot, packet.envelope) + "\n"
    texts = tuple(told if text == before else text for text in packet.texts)
    return replace(packet, envelope=envelope, texts=texts)

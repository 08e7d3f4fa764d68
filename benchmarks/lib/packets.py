"""Packets of the refund gate over real flights, as an engine gets them; also narrowed to one sort of decision."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sds.definitions.registry import find
from sds.gates.opening import preview_kernel
from sds.host.clock import now_ms
from sds.kernel.decision.packet import FORM, DecisionPacket, case_texts
from sds.kernel.envelope.envelope import DENY, KindBound, bound, envelope_of, meet
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.flow.intake import read_event
from sds.kernel.flow.kernel import Kernel

REFUND = "REFUND_TICKET"
REFUND_FORM = '{"action":"REFUND_TICKET","params":{"amount":50.00},"reason":"NOT_TRAVELLED"}'
NUMBER, AMOUNT = re.compile(r"[0-9]+(?:\.[0-9]+)?"), re.compile(rb'"amount":([0-9.]+)')
EARLIER = 64  # decisions before the measured ones, as at a gate at work: by then most recurring words were read
DIGITS_LO_MINOR, DIGITS_HI_MINOR = 1_000, 9_999  # 10.00 to 99.99: every amount has four digits


def recurring(packet: DecisionPacket) -> tuple[str, ...]:
    """Return the texts that an engine may have read before: the contract's, and the recurring words."""
    return packet.sections[:2]


def permits(packet: DecisionPacket, data: bytes) -> bool:
    """Tell whether a proposal's bytes are about this packet, and within its envelope."""
    proposal = parse_proposal(data)
    known = isinstance(proposal, Proposal) and proposal.context_ref == packet.snapshot.id
    return known and packet.envelope.contains(data)


def amount_is_shown(packet: DecisionPacket, data: bytes) -> bool:
    """Tell whether the decision's amount stands in its prompt, digit for digit."""
    shown = {number for text in packet.texts for number in NUMBER.findall(text)}
    return any(amount.decode() in shown for amount in AMOUNT.findall(data))


def packets_where(folder: Path, count: int, wanted: Callable[[DecisionPacket], bool]) -> list[DecisionPacket]:
    """Return the first `count` packets for which `wanted` is true."""
    with _previews(folder) as (_, packets):
        return list(islice(filter(wanted, packets), count))


def fixed_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return packets with three kinds or more and no free digit: the kernel fills in the amounts."""

    def is_fixed(packet: DecisionPacket) -> bool:
        return len(packet.envelope.kinds) > 2 and not any(kind.params for kind in packet.envelope.kinds)

    return packets_where(folder, count, is_fixed)


def digits_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return packets that permit a refund of four digits, a denial or an escalation. No two bounds in a row are equal."""
    with _previews(folder) as (kernel, packets):
        narrowed = (narrow_to_digits(kernel, packet, number) for number, packet in enumerate(packets))
        return list(islice((packet for packet in narrowed if packet is not None), count))


def narrow_to_digits(kernel: Kernel, packet: DecisionPacket, number: int) -> DecisionPacket | None:
    """Return a packet narrowed, as a safeguard would, to refunds within 10.00 to 99.99, with bounds that vary by `number`.

    Its mission and its form, which shows an amount, lead to a refund, so that a model that knows nothing of refunds writes
    digits under any engine. None: the packet permits no such refund.
    """
    amount = bound(DIGITS_LO_MINOR + number % 97, DIGITS_HI_MINOR - number % 89, scale=2)
    refund = packet.envelope.kind(REFUND)
    if refund is None or amount is None or refund.params[0][1].hi < DIGITS_HI_MINOR:
        return None
    narrowed = _narrowed(kernel, packet, replace(refund, params=(("amount", amount),)))
    _, _, rest = narrowed.texts[0].partition("Kinds of decision")
    led = f"You refund the tickets of passengers.\nKinds of decision{rest.replace(FORM, REFUND_FORM)}"
    return replace(narrowed, texts=(led, *narrowed.texts[1:]))


def narrow_to_denial(kernel: Kernel, packet: DecisionPacket, number: int) -> DecisionPacket | None:  # noqa: ARG001
    """Return a packet narrowed, as a safeguard would, to a denial or an escalation; None: it permits no denial."""
    return _narrowed(kernel, packet) if packet.envelope.kind(DENY) else None


def _narrowed(kernel: Kernel, packet: DecisionPacket, *kinds: KindBound) -> DecisionPacket:
    """Return a packet with DENY and these kinds, in its envelope and in the texts that the model reads."""
    denial = [kind for kind in packet.envelope.kinds if kind.kind == DENY]
    envelope = meet(packet.envelope, envelope_of([*denial, *kinds]))
    static, _, *rest = packet.texts
    _, before = case_texts(kernel.contract, kernel.rules, packet.snapshot, packet.envelope)
    recurring, numbers = case_texts(kernel.contract, kernel.rules, packet.snapshot, envelope)
    kept = [text for text in rest if text != before]
    case = [*kept[:-1], numbers, kept[-1]] if numbers else kept  # a preview has no feedback: evidence follows
    return replace(packet, envelope=envelope, texts=(static, recurring, *case))


def renewed(packet: DecisionPacket, timeout_ms: int | None = None) -> DecisionPacket:
    """Return a packet that expires `timeout_ms` from now; None: after as long a time as it had when it was made."""
    created_at_ms = now_ms()
    timeout_ms = packet.expires_at_ms - packet.created_at_ms if timeout_ms is None else timeout_ms
    return replace(packet, created_at_ms=created_at_ms, expires_at_ms=created_at_ms + timeout_ms)


@contextmanager
def _previews(folder: Path) -> Iterator[tuple[Kernel, Iterator[DecisionPacket]]]:
    gate = find("refund")
    with preview_kernel(gate, folder) as kernel:
        events = (read_event(kernel.contract, case.event) for case in gate.cases(folder))
        yield kernel, map(kernel.preview, events)

"""Whatever comes in: a verdict comes out, soon and in little memory, and nothing outside is ever accepted."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.decision.dim import Verdict, judge
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, parse_proposal, write_proposal
from tests import samples
from tests.kernel import world
from tests.scale import scale, seeded
from tests.strategies import random_envelope

TILL = world.contract()
PACKET = world.packet(TILL)
PAY = world.said(PACKET, "PAY", "OWED", amount="50.00")
SECONDS_MAX = 0.5
BYTES_MAX = 2 * 1024 * 1024
DEEP, LARGE = 10**5, 10**7


def verdict(data: bytes, packet: DecisionPacket = PACKET) -> Verdict:
    return judge(TILL, packet, data, world.standing(packet), Decoding("m", 1.0), world.NOW_MS)


def with_amount(text: bytes) -> bytes:
    return PAY.replace(b"50.00", text)


HOSTILE = {
    "not a number": with_amount(b"NaN"),
    "infinity": with_amount(b"-Infinity"),
    "negative zero": with_amount(b"-0"),
    "negative zero, scaled": with_amount(b"-0.00"),
    "overflow": with_amount(b"1e400"),
    "exponent": with_amount(b"5e1"),
    "huge integer": with_amount(b"9" * DEEP),
    "huge integer of the longest form": with_amount(b"9" * 32),
    "many dots": with_amount(b"1" + b"." * 31),
    "text": with_amount(b'"50.00"'),
    "truth": with_amount(b"true"),
    "null": with_amount(b"null"),
    "list": with_amount(b"[50.00]"),
    "arabic digits": with_amount("\u0665\u0660.\u0660\u0660".encode()),
    "duplicate keys": with_amount(b'50.00,"amount":0.01'),
    "duplicate keys, the worse one last": PAY.replace(b'{"amount":50.00}', b'{"amount":0.01,"amount":9999.00}'),
    "second object": PAY + PAY,
    "two actions": PAY.replace(b'{"action":"PAY"', b'{"action":"DENY","action":"PAY"'),
    "other order": b'{"params":{"amount":50.00},"action":"PAY"}',
    "no parameters where there are some": PAY.replace(b'"params":{"amount":50.00},', b""),
    "empty parameters": PAY.replace(b'"amount":50.00', b""),
    "empty parameters where there are none": world.said(PACKET, "DENY", "NOT_OWED").replace(
        b',"reason', b',"params":{},"reason'
    ),
    "extra field": PAY[:-1] + b',"approved":true}',
    "spaces": PAY.replace(b":", b": "),
    "line end": PAY + b"\n",
    "byte order mark": b"\xef\xbb\xbf" + PAY,
    "utf-16": PAY.decode().encode("utf-16"),
    "nul": PAY.replace(b"PAY", b"PAY\x00"),
    "lone surrogate": PAY.replace(b"OWED", b"\xed\xa0\x80"),
    "escaped surrogate": PAY.replace(b"OWED", b"\\ud800"),
    "escaped letter": PAY.replace(b"PAY", b"P\\u0041Y"),
    "wide letters": PAY.replace(b"PAY", "\uff30\uff21\uff39".encode()),
    "rationale nobody asked for": PAY.replace(b'{"action', b'{"rationale":"","action'),
    "a rationale at the end": PAY.replace(b',"context', b',"rationale":"","context'),
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"action":' * DEEP,
    "deep parameters": with_amount(b"[" * DEEP + b"]" * DEEP),
    "many parameters": with_amount(b"1" + b"".join(b',"p%d":1' % n for n in range(5000))),
    "nothing": b"",
    "large, of nothing": b"\x00" * LARGE,
    "large, of digits": with_amount(b"9" * LARGE),
    "large, of brackets": b"[" * LARGE,
    "large, of proposals": PAY * (LARGE // len(PAY)),
    "large, of text": PAY.replace(b'{"action', b'{"rationale":"' + b"a" * LARGE + b'","action'),
    "just under the limit": PAY.replace(b'{"action', b'{"rationale":"' + b"a" * 65_000 + b'","action'),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_rejected_soon_and_in_little_memory(data: bytes):
    tracemalloc.start()
    began = time.perf_counter()
    found = verdict(data)
    took = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ("REJECTED", "SCHEMA_INVALID") == (found.outcome, found.reason_code)
    assert took < SECONDS_MAX
    assert peak < BYTES_MAX
    assert len(repr(found.reasons)) < 2000


def judged(rng: Random, data: bytes, packet: DecisionPacket) -> str:
    """Judge once and check what must hold for any bytes; return the outcome."""
    found = verdict(data, packet)
    parsed = parse_proposal(data)
    inside = (
        packet.envelope.contains(data) and isinstance(parsed, Proposal) and parsed.context_ref == packet.snapshot.id
    )
    expected = ("ESCALATED" if b'"action":"ESCALATE"' in data else "ACCEPTED") if inside else "REJECTED"
    assert expected == found.outcome, (data, packet.envelope)
    assert (found.outcome == "ACCEPTED") == (not found.reasons)
    assert all(reason.code != "KERNEL_FAULT" for reason in found.reasons), data
    return found.outcome


def test_mutated_proposals_are_accepted_exactly_when_the_envelope_contains_them():
    rng, outcomes = seeded(11), {"ACCEPTED": 0, "REJECTED": 0, "ESCALATED": 0}
    for _ in range(scale(1_000, 20_000)):
        packet = replace(PACKET, envelope=random_envelope(rng.randint))
        for draw in (samples.near, samples.inside):
            written = draw(rng, packet.envelope, packet.snapshot.id)
            outcomes[judged(rng, write_proposal(written), packet)] += 1
        for _ in range(4):
            outcomes[judged(rng, samples.mutated(rng, packet.envelope, packet.snapshot.id), packet)] += 1
        other = rng.choice(("0" * 64, packet.snapshot.id[::-1], packet.snapshot.id.upper()))
        assert "REJECTED" == judged(rng, write_proposal(samples.inside(rng, packet.envelope, other)), packet)
    assert min(outcomes.values()) > 0, outcomes


def test_flipping_any_bit_of_a_proposal_is_judged_by_the_envelope_alone():
    rng = seeded(12)
    for at in range(len(PAY)):
        for bit in range(8):
            judged(rng, PAY[:at] + bytes([PAY[at] ^ 1 << bit]) + PAY[at + 1 :], PACKET)


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(data: bytes):
    assert "REJECTED" == verdict(data).outcome


@given(st.text(max_size=200), st.integers(0, 200))
def test_random_text_inside_a_proposal_is_judged_by_the_envelope_alone(text: str, at: int):
    judged(Random(0), PAY[:at] + text.encode("utf-8", "surrogatepass") + PAY[at:], PACKET)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON, JSON)
def test_any_json_is_judged_by_the_envelope_alone(action: object, params: object, reason: object):
    import json

    body = {"action": action, "params": params, "reason": reason, "context_ref": PACKET.snapshot.id}
    judged(Random(0), json.dumps(body, separators=(",", ":")).encode(), PACKET)

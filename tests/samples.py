"""Random proposals for an envelope: inside it, just outside it, and malformed bytes; and reading bytes as strict JSON."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random
from typing import Any

from sds.kernel.envelope.envelope import MAGNITUDE_MAX, Bound, DecisionEnvelope, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from tests.strategies import KINDS, PARAMS, REASONS

TEXT = "".join(chr(c) for c in range(32, 127) if chr(c) not in '"\\')
# Bytes to insert into a number, a text, or the JSON around them.
BENT = (b"-", b"+", b".", b"0", b"00", b"9", b"e2", b" ", b",", b'"', b"\\", b"\n", b"}", b"\x00", b"\x7f", b"\xc3\xa9")
BENT_NUMBERS = (
    "-0",
    "-0.00",
    "+5",
    "1.",
    ".5",
    "007",
    "1e2",
    "NaN",
    "Infinity",
    "true",
    '"5"',
    "0x10",
    "",
    "1_0",
    "--1",
)


def values_near(rng: Random, allowed: Bound) -> int:
    """Draw a value within a bound, or near one, near an end, or near a power of ten."""
    member = allowed.lo + rng.randrange((allowed.hi - allowed.lo) // allowed.step + 1) * allowed.step
    base = rng.choice((member, member, member, allowed.lo, allowed.hi, 10 ** rng.randrange(16), -member))
    return max(-MAGNITUDE_MAX, min(MAGNITUDE_MAX, base + rng.choice((0, 0, 0, -1, 1, allowed.step, -allowed.step))))


def member_of(rng: Random, allowed: Bound) -> int:
    return allowed.lo + rng.randrange((allowed.hi - allowed.lo) // allowed.step + 1) * allowed.step


def inside(rng: Random, envelope: DecisionEnvelope, context_ref: str) -> Proposal:
    """Draw a proposal of the envelope."""
    kind = rng.choice(envelope.kinds)
    params = tuple((name, format_literal(member_of(rng, b), b.scale)) for name, b in kind.params)
    return Proposal(kind.kind, params, rng.choice(kind.reasons), context_ref, _rationale(rng, envelope, 0))


def near(rng: Random, envelope: DecisionEnvelope, context_ref: str) -> Proposal:
    """Draw a proposal in the right form, except for some numbers; it is often just outside the envelope."""
    kind = rng.choice(envelope.kinds)
    params = [(name, _near_literal(rng, b)) for name, b in kind.params]
    if not rng.randrange(8):
        params = params[1:] if rng.randrange(2) else [*params, (rng.choice(PARAMS), "1")]
    action = kind.kind if rng.randrange(8) else rng.choice(KINDS)
    reason = rng.choice(kind.reasons) if rng.randrange(4) else rng.choice(REASONS)
    return Proposal(action, tuple(params), reason, context_ref, _rationale(rng, envelope, rng.randrange(3)))


def mutated(rng: Random, envelope: DecisionEnvelope, context_ref: str) -> bytes:
    """Draw bytes near the language: of a proposal by `near`, or of one inside with bytes added, cut, swapped or replaced."""
    if rng.randrange(2):
        return write_proposal(near(rng, envelope, context_ref))
    data = write_proposal(inside(rng, envelope, context_ref))
    at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return rng.choice(
        (
            data[:at] + rng.choice(BENT) + data[at:],
            data[:at] + rng.choice(BENT) + data[at + 1 :],
            data[:at] + data[at + 1 :],
            data[:at] + data[end:],
            data[:at],
            data.replace(b',"reason"', b',"params":{},"reason"', 1),
            data + rng.choice(BENT),
            rng.choice(BENT) + data,
            data[:at] + data[at:end].swapcase() + data[end:],
        )
    )


def as_under(schema: str, data: bytes) -> bytes:
    """Return a proposal as older schemas wrote it: 3.0.0 has `reason_code` for `reason`, 2.0.0 also empty `params`."""
    data = data.replace(b',"reason":', b',"reason_code":', 1)
    if schema == "3.0.0" or b',"params":' in data:
        return data
    return data.replace(b',"reason_code"', b',"params":{},"reason_code"', 1)


def _near_literal(rng: Random, allowed: Bound) -> str:
    if not rng.randrange(10):
        return rng.choice(BENT_NUMBERS)
    scale = allowed.scale if rng.randrange(10) else rng.randrange(7)
    return format_literal(values_near(rng, allowed), scale)


def _rationale(rng: Random, envelope: DecisionEnvelope, beyond: int) -> str | None:
    longest = envelope.rationale_chars_max + beyond
    if not longest or (beyond and not rng.randrange(3)):
        return None
    length = rng.choice((0, 1, longest, rng.randrange(longest + 1)))
    return "".join(rng.choices(TEXT, k=length))


def value_of(data: bytes) -> Any:
    """Return the JSON value of bytes; None where they are no JSON, or an object has a name twice."""
    try:
        return json.loads(data, parse_float=Decimal, parse_constant=_refuse, object_pairs_hook=_once)
    except ValueError:
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)

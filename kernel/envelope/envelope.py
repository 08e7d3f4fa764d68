"""The decision envelope: what may be decided now. Pure data, finite, hashable.

Laws, each stated as a property in `tests/kernel/envelope/test_envelope_laws.py`:

- `meet` is commutative, associative, idempotent, and never allows more than either side.
- `ESCALATE` is in every envelope, without parameters and with one fixed reason; `meet` never touches it.
- The refusal, `DENY` or what the contract calls it, is in every envelope but the bottom, `ESCALATE_ONLY`. The meet of two
  envelopes with different refusals is the bottom.
- Equal sets of decisions with the same refusal have equal hashes.

A decision is a kind, a reason and numbers. The rationale is a comment on it, with a form of its own: the envelope bounds
its length in characters, and a bound of 0 permits none. `meet` takes the smaller bound.

A number is in minor units, a member of a `Bound`: `{ n : lo <= n <= hi, n = residue (mod step) }`. The residue is absolute,
not relative to `lo`: so raising `lo` can only remove values, never shift others into range. Every bound is normalised: two
bounds hold the same values exactly when they are equal. No value here is ever a float.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

from sds.kernel.canonical import digest
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import StoreError

ESCALATE = "ESCALATE"
DENY = "DENY"  # the refusal of a contract that names none
ESCALATE_REASON = "HUMAN_REVIEW"
RATIONALE_CHARS_MAX = 2000
SCALE_MAX = 6
MAGNITUDE_MAX = 10**15
_LITERAL = re.compile(r"(-?)(0|[1-9][0-9]{0,15})(?:\.([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Bound:
    """A normalised, non-empty set of integers; `scale` is the number of decimals its literals show.

    Build one with `bound()`: the constructor does not normalise.
    """

    lo: int
    hi: int
    step: int
    residue: int
    scale: int

    def __contains__(self, value: object) -> bool:
        return type(value) is int and self.lo <= value <= self.hi and value % self.step == self.residue

    def __len__(self) -> int:
        return (self.hi - self.lo) // self.step + 1


def bound(lo: int, hi: int, *, step: int = 1, residue: int = 0, scale: int = 0) -> Bound | None:
    """Return the normalised bound, or None when it holds no value.

    `lo`, `hi`, `step`, `residue` are minor units (cents at scale 2). Raises ValueError outside the limits.
    """
    if not 0 <= scale <= SCALE_MAX:
        raise ValueError(f"scale `{scale}` is not between 0 and {SCALE_MAX}")
    if step < 1 or step > MAGNITUDE_MAX:
        raise ValueError(f"step `{step}` is not between 1 and {MAGNITUDE_MAX}")
    return _normalised(within_limits(lo), within_limits(hi), step, residue % step, scale)


def _normalised(lo: int, hi: int, step: int, residue: int, scale: int) -> Bound | None:
    """Return the one bound that holds these values, or None when there are none. `residue`: less than `step`."""
    lo += (residue - lo) % step
    hi -= (hi - residue) % step
    if lo > hi:
        return None
    return Bound(lo, hi, 1, 0, scale) if lo == hi else Bound(lo, hi, step, residue, scale)


def within_limits(value: int) -> int:
    """Return `value`. Raises ValueError when its magnitude is over MAGNITUDE_MAX, in minor units."""
    if not -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX:
        raise ValueError(f"`{value}` is beyond {MAGNITUDE_MAX}")
    return value


def meet_bounds(a: Bound, b: Bound) -> Bound | None:
    """Return the intersection of two bounds, or None when it is empty or their scales differ."""
    if a.scale != b.scale:
        return None
    common = gcd(a.step, b.step)
    if (a.residue - b.residue) % common:
        return None
    step = a.step // common * b.step
    turns = (b.residue - a.residue) // common * pow(a.step // common, -1, b.step // common) % (b.step // common)
    residue = (a.residue + a.step * turns) % step
    return _normalised(max(a.lo, b.lo), min(a.hi, b.hi), step, residue, a.scale)


def parse_literal(text: str, scale: int) -> int | None:
    """Return the minor units that a decimal literal denotes, or None when it is not in the one accepted form.

    That form has exactly `scale` decimals, no leading zero, no plus sign, no exponent and no negative zero.
    """
    found = _LITERAL.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals = found.groups(default="")
    if len(decimals) != scale:
        return None
    value = int(whole + decimals)
    if sign:
        return -value if value else None
    return value


def format_literal(value: int, scale: int) -> str:
    """Return the one accepted literal of `value` minor units: `format_literal(15000, 2) == "150.00"`."""
    sign, digits = ("-" if value < 0 else ""), str(abs(value)).rjust(scale + 1, "0")
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else f"{sign}{digits}"


@dataclass(frozen=True, slots=True)
class KindBound:
    """What a decision of one kind may carry. `reasons`: sorted reason codes, at least one.

    `params`: the numbers that the model chooses, in the order in which they are written. `fills`: (name, minor units,
    scale) of the numbers that the kernel fixes; they are never part of the language.
    """

    kind: str
    reasons: tuple[str, ...]
    params: tuple[tuple[str, Bound], ...] = ()
    fills: tuple[tuple[str, int, int], ...] = ()


_ESCALATE_BOUND = KindBound(ESCALATE, (ESCALATE_REASON,))


@dataclass(frozen=True, slots=True)
class DecisionEnvelope:
    """The permitted decision kinds, sorted by name, and the longest rationale in characters (0: none may be written).

    `refusal`: the kind by which the agent says no; DENY in the bottom. Build one with `envelope_of()`: it keeps the laws.
    """

    kinds: tuple[KindBound, ...]
    rationale_chars_max: int = 0
    refusal: str = DENY

    def kind(self, name: str) -> KindBound | None:
        return next((k for k in self.kinds if k.kind == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(k.kind for k in self.kinds)

    def objections(self, proposal: Proposal) -> list[tuple[str, str]]:
        """Return every way in which `proposal` lies outside the envelope, as (code, message); empty when it is inside."""
        permitted = self.kind(proposal.action)
        if permitted is None:
            found = [("RBAC_DENIED", f"`{proposal.action}` is not permitted now")]
        else:
            found = _objections(permitted, proposal)
        if (proposal.rationale is None) != (self.rationale_chars_max == 0):
            found.append(("SCHEMA_INVALID", "the rationale is missing, or the envelope permits none"))
        elif proposal.rationale is not None and len(proposal.rationale) > self.rationale_chars_max:
            found.append(("SCHEMA_INVALID", f"the rationale is longer than {self.rationale_chars_max} characters"))
        return found

    def contains(self, data: bytes) -> bool:
        """Tell whether these proposal bytes are a decision of this envelope, with any context reference."""
        proposal = parse_proposal(data)
        return isinstance(proposal, Proposal) and not self.objections(proposal)

    def as_data(self) -> dict[str, object]:
        """Return the envelope as JSON data: bounds in minor units, everything sorted; the refusal unless it is DENY."""
        return {
            "kinds": [
                {
                    "kind": k.kind,
                    "reasons": list(k.reasons),
                    "params": [[n, b.lo, b.hi, b.step, b.residue, b.scale] for n, b in k.params],
                    "fills": [list(f) for f in k.fills],
                }
                for k in self.kinds
            ],
            "rationale_chars_max": self.rationale_chars_max,
            **({"refusal": self.refusal} if self.refusal != DENY else {}),
        }

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form, 64 hexadecimal digits."""
        return digest(self.as_data())


def _objections(permitted: KindBound, proposal: Proposal) -> list[tuple[str, str]]:
    """Return every way in which a proposal is outside its permitted kind, as (code, message)."""
    found: list[tuple[str, str]] = []
    if proposal.reason_code not in permitted.reasons:
        found.append(("SCHEMA_INVALID", f"`{proposal.reason_code}` is not a reason of `{proposal.action}`"))
    if tuple(name for name, _ in proposal.params) != tuple(name for name, _ in permitted.params):
        found.append(("SCHEMA_INVALID", f"`{proposal.action}` does not take these parameters"))
        return found
    for (name, text), (_, allowed) in zip(proposal.params, permitted.params, strict=True):
        value = parse_literal(text, allowed.scale)
        if value is None:
            found.append(("SCHEMA_INVALID", f"`{name}` is not a number with {allowed.scale} decimals"))
        elif value not in allowed:
            found.append(("RBAC_DENIED", f"`{name}` is outside its bounds"))
    return found


def envelope_of(kinds: Iterable[KindBound], rationale_chars_max: int = 0, *, refusal: str = DENY) -> DecisionEnvelope:
    """Build an envelope that keeps the laws: kinds sorted, `ESCALATE` always in, and nothing else without the refusal."""
    rationale = max(0, min(rationale_chars_max, RATIONALE_CHARS_MAX))
    chosen = {k.kind: _sorted(k) for k in kinds if k.reasons}
    if refusal not in chosen:
        chosen, refusal = {}, DENY
    chosen[ESCALATE] = _ESCALATE_BOUND
    return DecisionEnvelope(tuple(chosen[name] for name in sorted(chosen)), rationale, refusal)


def envelope_from_data(data: Any, sha256: str) -> DecisionEnvelope:
    """Return the envelope that `as_data` has written. Raises StoreError when it is none, or its hash is not `sha256`."""
    try:
        kinds, refusal = tuple(map(_kind_from_data, data["kinds"])), str(data.get("refusal", DENY))
        made = DecisionEnvelope(kinds, int(data["rationale_chars_max"]), refusal)
        if made.hash == sha256 == digest(data):
            return made
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError("the recorded envelope is malformed") from error
    raise StoreError("the recorded envelope does not match the recorded hash")


def _kind_from_data(data: Any) -> KindBound:
    return KindBound(
        str(data["kind"]),
        tuple(map(str, data["reasons"])),
        tuple((str(name), _bound_from_data(*numbers)) for name, *numbers in data["params"]),
        tuple((str(name), int(value), int(scale)) for name, value, scale in data["fills"]),
    )


def _bound_from_data(lo: int, hi: int, step: int, residue: int, scale: int) -> Bound:
    made = bound(int(lo), int(hi), step=int(step), residue=int(residue), scale=int(scale))
    if made is None:
        raise ValueError("a bound that holds no value")
    return made


def _sorted(kind: KindBound) -> KindBound:
    reasons = tuple(sorted(set(kind.reasons)))
    return kind if reasons == kind.reasons else replace(kind, reasons=reasons)


ESCALATE_ONLY = envelope_of(())


def meet(*envelopes: DecisionEnvelope) -> DecisionEnvelope:
    """Return what all the given envelopes permit. At least one is needed."""
    return reduce(_meet_two, envelopes)


def _meet_two(a: DecisionEnvelope, b: DecisionEnvelope) -> DecisionEnvelope:
    if a is b or a == b:
        return a
    rationale_chars_max = min(a.rationale_chars_max, b.rationale_chars_max)
    if a.refusal != b.refusal:
        return envelope_of((), rationale_chars_max)
    both = (_meet_kinds(k, other) for k in a.kinds if (other := b.kind(k.kind)) is not None)
    return envelope_of((k for k in both if k is not None), rationale_chars_max, refusal=a.refusal)


def _meet_kinds(a: KindBound, b: KindBound) -> KindBound | None:
    """Return what both permit of one kind; None: nothing."""
    if a == b:
        return a
    same_shape = [n for n, _ in a.params] == [n for n, _ in b.params] and a.fills == b.fills
    reasons = tuple(r for r in a.reasons if r in b.reasons)
    if not same_shape or not reasons:
        return None
    params: list[tuple[str, Bound]] = []
    for (name, left), (_, right) in zip(a.params, b.params, strict=True):
        narrowed = meet_bounds(left, right)
        if narrowed is None:
            return None
        params.append((name, narrowed))
    return KindBound(a.kind, reasons, tuple(params), a.fills)

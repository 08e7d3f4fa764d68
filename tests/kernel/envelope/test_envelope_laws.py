"""The laws of the decision envelope. Sets here are small enough to be written out, decision by decision."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.contract.compiler import Rules
from sds.kernel.decision.safeguards import EnvelopeInputs, envelope_in_force, safeguards_of
from sds.kernel.envelope.envelope import (
    DENY,
    ESCALATE,
    ESCALATE_ONLY,
    RATIONALE_CHARS_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    format_literal,
    meet,
)
from sds.kernel.envelope.proposal import Proposal, write_proposal
from tests.kernel import world
from tests.scale import scale
from tests.strategies import envelopes

REF = "0" * 64
NEVER = ESCALATE_ONLY
REFUSALS = (DENY, "BLOCK")
Decision = tuple[object, ...]


def decisions(envelope: DecisionEnvelope) -> frozenset[Decision]:
    """Write out the set: kind, reason, every number with its scale, what the kernel fills in."""
    return frozenset(
        (kind.kind, reason, numbers, kind.fills)
        for kind in envelope.kinds
        for reason in kind.reasons
        for numbers in product(*([(name, n, b.scale) for n in _values(b)] for name, b in kind.params))
    )


def _values(allowed: Bound) -> range:
    return range(allowed.lo, allowed.hi + 1, allowed.step)


def _bytes(decision: Decision, rationale: str | None) -> bytes:
    kind, reason, numbers, _ = decision
    params = tuple((name, format_literal(n, decimals)) for name, n, decimals in numbers)  # type: ignore[attr-defined]
    return write_proposal(Proposal(str(kind), params, str(reason), REF, rationale))


@st.composite
def small_bounds(draw: st.DrawFn) -> Bound:
    step, decimals = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 0, 1]))
    lo = draw(st.integers(-4, 4))
    found = bound(lo, lo + draw(st.integers(0, 6)), step=step, residue=draw(st.integers(0, 3)), scale=decimals)
    return found or Bound(lo, lo, 1, 0, decimals)


@st.composite
def small_kinds(draw: st.DrawFn, name: str) -> KindBound:
    reasons = tuple(draw(st.lists(st.sampled_from("ABC"), min_size=1, max_size=3)))
    if name in REFUSALS:
        return KindBound(name, reasons)
    params = tuple((p, draw(small_bounds())) for p in draw(st.sampled_from([("a",), ("a",), ("a", "b"), ()])))
    fills = draw(st.sampled_from([(), (), (("fixed", 1, 0),), (("fixed", 2, 0),)]))
    return KindBound(name, reasons, params, fills)


@st.composite
def small_envelopes(draw: st.DrawFn, rationale: int | None = 0) -> DecisionEnvelope:
    refusal = draw(st.sampled_from([DENY, DENY, DENY, "BLOCK"]))
    names = draw(st.lists(st.sampled_from(["PAY", "HOLD", "PAY_LATER", *[refusal] * 3, ESCALATE]), unique=True))
    longest = draw(st.sampled_from([0, 0, 3, 5])) if rationale is None else rationale
    return envelope_of([draw(small_kinds(name)) for name in names], longest, refusal=refusal)


anything = st.one_of(small_envelopes(None), envelopes())


@given(anything, anything)
def test_meet_is_commutative(a: DecisionEnvelope, b: DecisionEnvelope):
    assert meet(a, b) == meet(b, a)


@given(anything, anything, anything)
def test_meet_is_associative(a: DecisionEnvelope, b: DecisionEnvelope, c: DecisionEnvelope):
    assert meet(meet(a, b), c) == meet(a, meet(b, c)) == meet(a, b, c)


@given(anything, anything)
def test_meet_is_idempotent(a: DecisionEnvelope, b: DecisionEnvelope):
    assert a == meet(a, a)
    assert meet(a, b) == meet(a, b, a, b)


@given(small_envelopes(None), small_envelopes(None))
def test_meet_never_allows_more_than_either_side(a: DecisionEnvelope, b: DecisionEnvelope):
    both = meet(a, b)
    assert decisions(both) <= decisions(a) & decisions(b)
    assert both.rationale_chars_max == min(a.rationale_chars_max, b.rationale_chars_max)


@given(small_envelopes(), small_envelopes())
def test_meet_is_the_intersection_unless_no_denial_is_left(a: DecisionEnvelope, b: DecisionEnvelope):
    common = decisions(a) & decisions(b)
    expected = common if any(kind in REFUSALS for kind, *_ in common) else decisions(NEVER)
    assert expected == decisions(meet(a, b))


@given(small_envelopes(), small_envelopes(), small_envelopes())
def test_narrowing_one_side_narrows_the_meet(a: DecisionEnvelope, b: DecisionEnvelope, c: DecisionEnvelope):
    assert decisions(meet(a, b, c)) <= decisions(meet(a, c))


@given(anything, anything)
def test_escalate_is_in_every_envelope_with_one_reason_and_no_parameters(a: DecisionEnvelope, b: DecisionEnvelope):
    for envelope in (a, b, meet(a, b), NEVER):
        assert KindBound(ESCALATE, ("HUMAN_REVIEW",)) == envelope.kind(ESCALATE)


@given(anything, anything)
def test_the_refusal_is_in_every_envelope_but_the_bottom(a: DecisionEnvelope, b: DecisionEnvelope):
    for envelope in (a, b, meet(a, b)):
        assert (envelope.kind(envelope.refusal) is None) == (envelope.names == (ESCALATE,))


@given(small_envelopes(), small_envelopes())
def test_two_refusals_have_nothing_in_common_but_the_human(a: DecisionEnvelope, b: DecisionEnvelope):
    assert a.refusal == b.refusal or meet(a, b) == NEVER
    assert NEVER.refusal == DENY


def test_an_envelope_that_denies_is_told_as_before_there_were_other_refusals():
    kinds = [KindBound(DENY, ("A",)), KindBound("PAY", ("A",))]
    assert {"kinds", "rationale_chars_max"} == envelope_of(kinds).as_data().keys()
    blocks = envelope_of([KindBound("BLOCK", ("A",)), *kinds[1:]], refusal="BLOCK")
    assert "BLOCK" == blocks.as_data()["refusal"]


@given(anything)
def test_nothing_is_below_the_bottom(a: DecisionEnvelope):
    assert NEVER == meet(a, NEVER)


def test_nobody_declares_an_escalation_of_their_own():
    forged = KindBound(ESCALATE, ("PAY_ME",), (("amount", Bound(0, 9, 1, 0, 0)),))
    assert NEVER == envelope_of([forged])


@given(small_envelopes(), small_envelopes())
def test_equal_sets_have_equal_hashes_and_other_sets_other_hashes(a: DecisionEnvelope, b: DecisionEnvelope):
    assert (decisions(a) == decisions(b)) == (a.hash == b.hash)
    assert (a == b) == (a.hash == b.hash)


def test_every_way_to_write_a_small_set_has_one_hash():
    by_set: dict[frozenset[Decision], set[str]] = {}
    reasons = [("A",), ("A", "B"), ("B", "A"), ("B", "A", "B")]
    ends = product(range(-3, 4), range(4), range(1, scale(4, 6)), range(4), reasons, (0, 1))
    for lo, size, step, residue, codes, decimals in ends:
        allowed = bound(lo, lo + size, step=step, residue=residue, scale=decimals)
        kinds = [KindBound(DENY, codes)] + ([KindBound("PAY", codes, (("a", allowed),))] if allowed else [])
        for way in (envelope_of(kinds), envelope_of(kinds[::-1])):
            by_set.setdefault(decisions(way), set()).add(way.hash)
    assert {1} == {len(hashes) for hashes in by_set.values()}
    assert len(by_set) == len(set().union(*by_set.values()))


@given(small_envelopes(), small_envelopes(), st.sampled_from([None, "", "why"]))
def test_contains_says_yes_to_the_decisions_of_the_set_and_to_no_other(
    a: DecisionEnvelope, b: DecisionEnvelope, rationale: str | None
):
    # What the kernel fills in is not said, and so not asked.
    spoken = {decision[:3] for decision in decisions(a)}
    for decision in decisions(a) | decisions(b):
        assert (decision[:3] in spoken and rationale is None) == a.contains(_bytes(decision, rationale))


@given(small_envelopes(rationale=3))
def test_a_rationale_is_written_exactly_where_one_is_bounded(a: DecisionEnvelope):
    decision = next(iter(decisions(a)))
    accepted = [text for text in (None, "", "abc", "abcd") if a.contains(_bytes(decision, text))]
    assert ["", "abc"] == accepted


@pytest.mark.parametrize(("asked", "kept"), [(-1, 0), (0, 0), (7, 7), (10**9, RATIONALE_CHARS_MAX)])
def test_the_rationale_has_a_limit_that_nobody_sets_aside(asked: int, kept: int):
    assert kept == envelope_of([], asked).rationale_chars_max


@given(small_envelopes(None), st.lists(small_envelopes(None), max_size=4), small_envelopes(None), st.randoms())
def test_adding_a_safeguard_never_allows_more_and_order_does_not_matter(
    full: DecisionEnvelope, others: list[DecisionEnvelope], added: DecisionEnvelope, rng: object
):
    guards = [lambda _full, _now, says=says: says for says in others]
    before = envelope_in_force(full, world.situation(), tuple(guards))
    guards.append(lambda _full, _now: added)
    after = envelope_in_force(full, world.situation(), tuple(guards))
    assert decisions(after) <= decisions(before) <= decisions(full)
    rng.shuffle(guards)  # type: ignore[attr-defined]  # Hypothesis gives a random.Random
    assert after == envelope_in_force(full, world.situation(), tuple(guards))


@pytest.mark.parametrize("broken", [lambda full, now: 1 / 0, lambda full, now: None, lambda full: full])
def test_a_broken_safeguard_leaves_only_the_human(broken: object):
    full = envelope_of([KindBound(DENY, ("A",)), KindBound("PAY", ("A",))])
    assert NEVER == envelope_in_force(full, world.situation(), (lambda f, _: f, broken))  # type: ignore[arg-type]


def test_a_safeguard_sees_the_contracts_own_envelope_and_never_another_safeguards():
    full, seen = envelope_of([KindBound(DENY, ("A", "B")), KindBound("PAY", ("A",))]), []

    def watching(given_full: DecisionEnvelope, _: EnvelopeInputs) -> DecisionEnvelope:
        seen.append(given_full)
        return envelope_of([KindBound(DENY, ("A",))])

    envelope_in_force(full, world.situation(), (watching, watching))
    assert [full, full] == seen


TILL = world.contract()
SITUATIONS = st.builds(
    world.situation,
    st.builds(
        world.fields,
        claim_due=st.booleans(),
        claim_minutes=st.sampled_from([-5, 0, 4, 5, 60, 10**15]),
        claim_size=st.sampled_from(["small", "large", "vast"]),
        account_left=st.sampled_from([None, -1, 0, 1, 7, 5000, True]),
        account_slots=st.sampled_from([None, 0, 1, 2]),
    ),
    agent_active=st.booleans() | st.just(True),
    in_effect=st.booleans() | st.just(True),
    halted=st.booleans() | st.just(False),
    spend_left=st.sampled_from([None, None, 0, 3, 6000, 10**15]),
)


@given(SITUATIONS)
def test_every_safeguard_of_the_kernel_is_a_narrowing(now: EnvelopeInputs):
    full, guards = Rules(TILL).envelope(now.fields), safeguards_of(TILL)
    for guard in guards:
        said = envelope_in_force(full, now, (guard,))
        assert _within(said, full)
        assert _within(envelope_in_force(full, now, guards), said)


def _within(inner: DecisionEnvelope, outer: DecisionEnvelope) -> bool:
    """`inner` allows nothing that `outer` does not: to meet them changes nothing."""
    return meet(inner, outer) == inner

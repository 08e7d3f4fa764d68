"""Every form of a language says the same: expression, Lark, JSON Schema, and the kernel, which knows no grammar."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sds.grammars.emit import json_schema
from sds.grammars.language import language
from sds.kernel.envelope.envelope import DENY, Bound, DecisionEnvelope, KindBound, bound, envelope_of, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import LanguageError
from tests.grammars.byte_matcher import ByteMatcher
from tests.model_fixtures import CONTEXT_REF
from tests.samples import inside, mutated, near, value_of
from tests.scale import scale, seeded
from tests.strategies import envelopes, random_envelope

SAMPLES_EACH = 50


def samples(rng: Random, envelope: DecisionEnvelope, count: int) -> list[bytes]:
    """Half of them inside, half bent."""
    good = [write_proposal(inside(rng, envelope, CONTEXT_REF)) for _ in range(count // 2)]
    return good + [mutated(rng, envelope, CONTEXT_REF) for _ in range(count // 2)]


def test_the_kernel_and_the_expression_agree_both_ways() -> None:
    rng, asked, accepted = seeded(20260710), 0, 0
    tail = f',"context_ref":"{CONTEXT_REF}"}}'.encode()
    while asked < scale(20_000, 400_000):
        envelope = random_envelope(rng.randint)
        matches = re.compile(language(envelope, CONTEXT_REF).regex().encode()).fullmatch
        for data in samples(rng, envelope, SAMPLES_EACH):
            asked += 1
            permitted = envelope.contains(data) and data.endswith(tail)
            accepted += permitted
            assert permitted == bool(matches(data)), (envelope, data)
    assert asked // 2 <= accepted <= asked * 3 // 4


@settings(max_examples=scale(30, 1000), deadline=None)
@given(envelopes(), st.integers(0, 2**32))
def test_the_expression_and_lark_accept_the_same_bytes(envelope: DecisionEnvelope, seed: int) -> None:
    said = language(envelope, CONTEXT_REF)
    matches = re.compile(said.regex().encode()).fullmatch
    matcher = ByteMatcher(said.lark())
    for data in samples(Random(seed), envelope, 20):
        assert bool(matches(data)) == matcher.accepts(data), data


@settings(max_examples=scale(60, 2000), deadline=None)
@given(envelopes(), st.integers(0, 2**32))
def test_the_schema_accepts_the_same_values(envelope: DecisionEnvelope, seed: int) -> None:
    rng, said = Random(seed), language(writable(envelope), CONTEXT_REF)
    matches = re.compile(said.regex()).fullmatch
    schema = json.loads(json.dumps(json_schema.emit(said)), parse_float=Decimal)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for draw in (inside, near) * 5:
        proposal = draw(rng, said.envelope, CONTEXT_REF)
        if (value := value_of(write_proposal(proposal))) is None:
            continue
        expected = matches(write_proposal(rescaled(proposal, said.envelope, value.get("params", {}))).decode())
        assert bool(expected) == validator.is_valid(value), value


def writable(envelope: DecisionEnvelope) -> DecisionEnvelope:
    """Drop residues that JSON Schema cannot say of so many values."""
    kinds = [
        KindBound(k.kind, k.reasons, tuple((name, sayable(allowed)) for name, allowed in k.params), k.fills)
        for k in envelope.kinds
    ]
    return envelope_of(kinds, envelope.rationale_chars_max)


def sayable(allowed: Bound) -> Bound:
    if not allowed.residue or len(allowed) <= json_schema.ENUM_VALUES_MAX:
        return allowed
    return bound(allowed.lo, allowed.hi, step=allowed.step, scale=allowed.scale) or Bound(0, 0, 1, 0, allowed.scale)


def rescaled(proposal: Proposal, envelope: DecisionEnvelope, values: dict[str, Any]) -> Proposal:
    """Write the same values in the form of the language, where they have one."""
    kind = envelope.kind(proposal.action)
    scales = {name: allowed.scale for name, allowed in kind.params} if kind else {}
    params = tuple((name, literal(values[name], scales.get(name, 0))) for name, _ in proposal.params)
    return Proposal(proposal.action, params, proposal.reason_code, proposal.context_ref, proposal.rationale)


def literal(value: object, decimals: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return json.dumps(value)
    minor = value * 10**decimals
    return format_literal(int(minor), decimals) if minor == int(minor) else str(value)


def test_a_residue_no_schema_can_say_is_refused_and_not_widened() -> None:
    allowed = bound(3, 10**6, step=10, residue=3)
    assert allowed is not None
    envelope = envelope_of([KindBound("PAY", ("OK",), (("amount", allowed),)), KindBound(DENY, ("NO",))])
    with pytest.raises(LanguageError, match=r"`amount` has no JSON Schema: it has over 4096 values and a residue"):
        json_schema.emit(language(envelope, CONTEXT_REF))


def test_every_number_of_the_schema_is_exact_as_text() -> None:
    rng = seeded(20260711)
    for _ in range(scale(2000, 20_000)):
        places = rng.randint(0, 6)
        minor = rng.randint(-(10**15), 10**15)
        text = json.dumps(json_schema._decimal(minor, places))
        assert Decimal(minor).scaleb(-places) == Decimal(text)

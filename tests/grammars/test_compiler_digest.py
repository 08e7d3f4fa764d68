"""A plan's digest: the same for the same shape in the same tokenizer, another for anything else."""

from __future__ import annotations

from dataclasses import replace

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.bounds import Bound
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, envelope_of
from tests.model_fixtures import CONTEXT_REF

REASONS = ("LATE", "LOST")


class Bytes:
    """A tokenizer with a token for each byte, its number shifted."""

    vocab_size = 512

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return [byte + self._shift for byte in text]

    def piece(self, token: int) -> bytes:
        return bytes([token - self._shift])


def refund(lo: int = 1, hi: int = 900, scale: int = 2, name: str = "amount") -> DecisionEnvelope:
    kinds = [KindBound("PAY", REASONS, ((name, Bound(lo, hi, 1, 0, scale)),)), KindBound(DENY, REASONS)]
    return envelope_of(kinds)


def plan(envelope: DecisionEnvelope, words: Bytes | None = None) -> str:
    return GrammarCompiler(words or Bytes()).walk(envelope, CONTEXT_REF).plan


def test_bounds_scale_and_reference_are_no_part_of_it() -> None:
    planner = GrammarCompiler(Bytes())
    first = planner.walk(refund(), CONTEXT_REF).plan
    assert first == planner.walk(refund(5, 17), "f" * 64).plan == plan(refund(scale=0))
    assert 64 == len(first)


def test_another_shape_or_tokenizer_is_another_plan() -> None:
    plans = [
        plan(refund()),
        plan(refund(), Bytes(shift=7)),
        plan(refund(lo=-5)),
        plan(refund(lo=-5, hi=-1)),
        plan(refund(name="fee")),
        plan(envelope_of([KindBound(DENY, REASONS)])),
        plan(envelope_of([KindBound(DENY, REASONS[:1])])),
        plan(replace(refund(), rationale_chars_max=9)),
    ]
    assert len(plans) == len(set(plans))


def test_sixteen_signed_parameters_are_told_in_no_time() -> None:
    params = tuple((f"p{i:02}", Bound(-9, 9, 1, 0, 0)) for i in range(16))
    assert 64 == len(plan(envelope_of([KindBound("PAY", ("LATE",), params), KindBound(DENY, ("LATE",))])))

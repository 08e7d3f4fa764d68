"""A compiled grammar's digest: the same for the same shape in the same tokenizer, another for anything else."""

from __future__ import annotations

from dataclasses import replace

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.envelope import DENY, Bound, DecisionEnvelope, KindBound, envelope_of
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


def digest(envelope: DecisionEnvelope, words: Bytes | None = None) -> str:
    return GrammarCompiler(words or Bytes()).matcher(envelope, CONTEXT_REF).grammar_sha256


def test_bounds_scale_and_reference_are_no_part_of_it() -> None:
    compiler = GrammarCompiler(Bytes())
    first = compiler.matcher(refund(), CONTEXT_REF).grammar_sha256
    assert first == compiler.matcher(refund(5, 17), "f" * 64).grammar_sha256 == digest(refund(scale=0))
    assert 64 == len(first)


def test_another_shape_or_tokenizer_has_another_digest() -> None:
    digests = [
        digest(refund()),
        digest(refund(), Bytes(shift=7)),
        digest(refund(lo=-5)),
        digest(refund(lo=-5, hi=-1)),
        digest(refund(name="fee")),
        digest(envelope_of([KindBound(DENY, REASONS)])),
        digest(envelope_of([KindBound(DENY, REASONS[:1])])),
        digest(replace(refund(), rationale_chars_max=9)),
    ]
    assert len(digests) == len(set(digests))


def test_sixteen_signed_parameters_are_compiled_in_no_time() -> None:
    params = tuple((f"p{i:02}", Bound(-9, 9, 1, 0, 0)) for i in range(16))
    assert 64 == len(digest(envelope_of([KindBound("PAY", ("LATE",), params), KindBound(DENY, ("LATE",))])))

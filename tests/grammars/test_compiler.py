"""A matcher over a compiled grammar writes exactly the language, in the tokenizer's own spelling; llguidance is the second opinion."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sds.benchmarks.peer.llguidance_tokenizer import llguidance_tokenizer
from sds.grammars.language import language
from sds.grammars.tokens.compiler import GRAMMARS_MAX, GrammarCompiler
from sds.grammars.tokens.selftest import follow
from sds.kernel.envelope.envelope import (
    DENY,
    ESCALATE_ONLY,
    MAGNITUDE_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    format_literal,
)
from sds.kernel.envelope.proposal import TEXT_CHARS
from sds.kernel.errors import LanguageError
from tests.grammars.llguidance_mask import Mask
from tests.grammars.matchers import SMALL, STEPS_MAX, at_random, every_end, finished_by, pool, some
from tests.grammars.tokenizers import Tokens
from tests.model_fixtures import CONTEXT_REF, refund_envelope
from tests.scale import scale, seeded
from tests.strategies import REASONS, random_bound


def decisions(envelope: DecisionEnvelope) -> set[bytes]:
    """Write every decision of a small envelope without a rationale, by hand."""
    found = set()
    for kind in envelope.kinds:
        rows = [""]
        for name, b in kind.params:
            values = [v for v in range(b.lo, b.hi + 1) if v in b]
            rows = [f'{row}{"," if row else ""}"{name}":{format_literal(v, b.scale)}' for row in rows for v in values]
        written = [f'"params":{{{row}}},' if kind.params else "" for row in rows]
        for reason in kind.reasons:
            found |= {
                f'{{"action":"{kind.kind}",{params}"reason":"{reason}","context_ref":"{CONTEXT_REF}"}}'
                for params in written
            }
    return {text.encode() for text in found}


@pytest.mark.parametrize("envelope", SMALL.values(), ids=SMALL)
def test_every_decision_is_reached_in_one_way_and_nothing_else(words: Tokens, envelope: DecisionEnvelope) -> None:
    ends = [*every_end(GrammarCompiler(words).matcher(envelope, CONTEXT_REF))]
    assert sorted(decisions(envelope)) == sorted(matcher.data for matcher in ends)
    assert all(matcher.data == b"".join(map(words.piece, matcher.tokens)) for matcher in ends)


def test_no_matcher_leaves_the_mask_and_every_decision_ends_in_the_language(words: Tokens) -> None:
    compiler, tokenizer = GrammarCompiler(words), llguidance_tokenizer(words)
    for rng, envelope in pool(20260811, scale(25, 3000)):
        mask, matcher = Mask(tokenizer, language(envelope, CONTEXT_REF)), compiler.matcher(envelope, CONTEXT_REF)
        fed = 0
        for _ in range(STEPS_MAX):
            matcher.accept_forced()
            mask.advance(matcher.tokens[fed:])
            fed = len(matcher.tokens)
            if matcher.finished:
                break
            point, allowed = matcher.choice_point(), mask.allowed()
            assert len(set(point.tokens.tolist())) == len(point.tokens) >= 2
            assert allowed[point.tokens].all(), (envelope, matcher.data)
            token = int(rng.choice(point.tokens))
            matcher.accept(token)
        assert mask.finished
        assert envelope.contains(matcher.data)
        assert matcher.data.endswith(f'"context_ref":"{CONTEXT_REF}"}}'.encode())


def test_what_the_mask_permits_besides_is_another_spelling_only(words: Tokens) -> None:
    """Leave the matcher at a token that the mask alone permits, let the mask finish: a matcher writes these bytes, too."""
    compiler, tokenizer = GrammarCompiler(words), llguidance_tokenizer(words)
    left = 0
    for rng, envelope in pool(20260812, scale(16, 1000)):
        mask, matcher = Mask(tokenizer, language(envelope, CONTEXT_REF)), compiler.matcher(envelope, CONTEXT_REF)
        written = b""
        for _ in range(STEPS_MAX):
            if mask.finished:
                break
            allowed = np.flatnonzero(mask.allowed())
            here = matcher.data == written
            if here:
                matcher.accept_forced()
                here = matcher.data == written
            open_ = matcher.choice_point().tokens if here and not matcher.finished else allowed
            foreign = np.setdiff1d(allowed, open_)
            left += len(foreign)
            token = int(rng.choice(foreign if len(foreign) and rng.randrange(2) else allowed))
            mask.advance([token])
            written += words.piece(token)
            if here and token in open_.tolist():
                matcher.accept(token)
        assert envelope.contains(written)
        assert written == follow(compiler.matcher(envelope, CONTEXT_REF), written), envelope
    assert left


@pytest.mark.parametrize("name", ["embedded", "threes"])
def test_the_tokens_are_those_the_tokenizer_makes_of_the_finished_text(
    name: str, request: pytest.FixtureRequest
) -> None:
    words: Tokens = request.getfixturevalue(name)
    compiler = GrammarCompiler(words)
    for rng, envelope in pool(20260813, scale(80, 10_000), rationale=False):
        context_ref = f"{rng.getrandbits(256):064x}"
        matcher = finished_by(compiler.matcher(envelope, context_ref), at_random(rng))
        assert matcher.copy().canonical()
        assert words.tokenize(matcher.data, special=False) == matcher.tokens, matcher.data


def test_a_decision_that_the_tokenizer_would_spell_otherwise_is_not_canonical(words: Tokens) -> None:
    compiler = GrammarCompiler(words)
    found = Counter[bool]()
    for rng, envelope in pool(20260815, scale(25, 1000)):
        matcher = finished_by(compiler.matcher(envelope, CONTEXT_REF), at_random(rng))
        spelled, again = matcher.copy().tokens, words.tokenize(matcher.data, special=False)
        assert (spelled == again) == matcher.canonical()
        assert spelled == matcher.tokens
        found[spelled == again] += 1
    assert found[True]
    assert found[False], "free text is written as no tokenizer would"


def test_a_token_outside_the_choice_point_is_refused_and_changes_nothing(words: Tokens) -> None:
    compiler = GrammarCompiler(words)
    for rng, envelope in pool(20260814, scale(12, 500)):
        matcher = compiler.matcher(envelope, CONTEXT_REF)
        for _ in range(STEPS_MAX):
            matcher.accept_forced()
            if matcher.finished:
                break
            open_, before = matcher.choice_point().tokens.tolist(), (matcher.data, matcher.tokens.copy())
            outside = {rng.randrange(-2, words.vocab_size + 2) for _ in range(50)} | {words.eos}
            for token in outside.difference(open_):
                with pytest.raises(LanguageError) as refused:
                    matcher.accept(token)
                assert "MASK_FAILED" == refused.value.reason_code
            assert before == (matcher.data, matcher.tokens)
            assert open_ == matcher.choice_point().tokens.tolist()
            matcher.accept(int(rng.choice(open_)))
        for ask in (matcher.choice_point, partial(matcher.accept, 0)):
            with pytest.raises(LanguageError, match="the decision is finished"):
                ask()


@pytest.mark.parametrize("step", [7, 9973, 10**9 + 7])
def test_a_step_without_a_short_expression_is_written_all_the_same(embedded: Tokens, step: int) -> None:
    envelope, rng, compiler = (
        some(amount=bound(-MAGNITUDE_MAX, MAGNITUDE_MAX, step=step)),
        seeded(1),
        GrammarCompiler(embedded),
    )
    for _ in range(scale(30, 1000)):
        matcher = finished_by(compiler.matcher(envelope, CONTEXT_REF), at_random(rng))
        assert envelope.contains(matcher.data)


@settings(max_examples=scale(50, 5000))
@given(st.data())
def test_a_wider_bound_removes_no_path(embedded: Tokens, data: st.DataObject) -> None:
    pick = lambda lo, hi: data.draw(st.integers(lo, hi))  # noqa: E731
    narrow = random_bound(pick)
    lo, hi = (end + sign * pick(0, 300) * narrow.step for end, sign in ((narrow.lo, -1), (narrow.hi, 1)))
    wide = replace(narrow, lo=lo, hi=hi, residue=narrow.lo % narrow.step)
    compiler = GrammarCompiler(embedded)
    matcher = finished_by(compiler.matcher(some(amount=narrow), CONTEXT_REF), at_random(Random(pick(0, 10**6))))
    wider = compiler.matcher(some(amount=wide), CONTEXT_REF)
    for token in matcher.tokens:
        if not wider.finished:
            wider.accept(token)
    assert (matcher.data, matcher.tokens) == (wider.data, wider.tokens)


@pytest.mark.parametrize("chars", [1, 2, 7, 40])
def test_a_rationale_is_free_text_within_its_limit(words: Tokens, chars: int) -> None:
    compiler, rng, lengths = GrammarCompiler(words), seeded(20260815), set[int]()
    for i in range(scale(15, 300)):
        matcher = compiler.matcher(replace(refund_envelope(), rationale_chars_max=chars), CONTEXT_REF)
        finished_by(
            matcher, lambda point, i=i: rng.randrange(i % 2, 1 if i % 2 == rng.randrange(9) == 0 else len(point.tokens))
        )
        assert matcher.data.count(b'"rationale":"') == 1
        assert replace(refund_envelope(), rationale_chars_max=chars).contains(matcher.data)
        lengths.add(len(matcher.data.split(b'"rationale":"')[1].split(b'"')[0]))
    assert chars in lengths


def test_every_text_that_the_form_permits_can_be_written(words: Tokens) -> None:
    every = "".join(chr(c) for c in range(32, 127) if chr(c) not in '"\\')
    assert 95 - 2 == len(every)
    assert r"[ !#-\[\]-~]" == TEXT_CHARS
    envelope = replace(ESCALATE_ONLY, rationale_chars_max=len(every))
    start = finished_by(GrammarCompiler(words).matcher(envelope, CONTEXT_REF), lambda _: 0).data
    data = start.replace(b'"rationale":""', f'"rationale":"{every}"'.encode())
    assert data != start
    assert data == follow(GrammarCompiler(words).matcher(envelope, CONTEXT_REF), data)


def test_a_compiler_keeps_few_grammars_and_forgets_none_of_the_language(embedded: Tokens) -> None:
    compiler, first = GrammarCompiler(embedded), some(amount=bound(1, 9))
    before = {matcher.data for matcher in every_end(compiler.matcher(first, CONTEXT_REF))}
    for i in range(GRAMMARS_MAX + 5):
        compiler.matcher(envelope_of([KindBound(DENY, (f"R{i}",))]), CONTEXT_REF)
    assert GRAMMARS_MAX == len(compiler._grammars)
    assert before == {matcher.data for matcher in every_end(compiler.matcher(first, CONTEXT_REF))}


def test_new_bounds_and_a_new_reference_compile_nothing(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(embedded)
    compiler.matcher(some(amount=bound(1, 900)), CONTEXT_REF)
    monkeypatch.setattr(embedded, "tokenize", None)
    for hi in range(901, 1000):
        matcher = compiler.matcher(some(amount=bound(2, hi)), f"{hi:064x}")
        matcher.accept_forced()
        assert "action" == matcher.choice_point().choice


def of_one(*reasons: str, params: tuple[tuple[str, Bound], ...] = (), chars: int = 0) -> DecisionEnvelope:
    return DecisionEnvelope((KindBound("PAY", reasons, params),), chars)


@pytest.mark.parametrize(
    ("envelope", "context_ref", "message"),
    [
        (ESCALATE_ONLY, "0" * 63, "the context reference is not 64 hexadecimal digits"),
        (ESCALATE_ONLY, "G" * 64, "the context reference is not 64 hexadecimal digits"),
        (ESCALATE_ONLY, "0" * 63 + "\n", "the context reference is not 64 hexadecimal digits"),
        (of_one("A", chars=2001), CONTEXT_REF, "a rationale of `2001` characters is not within 0..2000"),
        (of_one("A", chars=-1), CONTEXT_REF, "a rationale of `-1` characters is not within 0..2000"),
        (of_one(), CONTEXT_REF, "a reason code is missing or given twice"),
        (of_one("A", "A"), CONTEXT_REF, "a reason code is missing or given twice"),
        (of_one("a"), CONTEXT_REF, "`a` is not a reason code that a proposal can hold"),
        (
            of_one("A", params=(("X", Bound(1, 2, 1, 0, 0)),)),
            CONTEXT_REF,
            "`PAY` has parameters that a proposal cannot hold",
        ),
        (of_one("A", params=(("x", Bound(3, 4, 10, 7, 0)),)), CONTEXT_REF, "`x` has bounds that contain no value"),
        (of_one("A", params=(("x", Bound(2, 1, 1, 0, 0)),)), CONTEXT_REF, "`x` has bounds that contain no value"),
    ],
)
def test_what_the_form_cannot_write_is_refused(
    embedded: Tokens, envelope: DecisionEnvelope, context_ref: str, message: str
) -> None:
    compiler = GrammarCompiler(embedded)
    for _ in range(2):  # a refusal is not kept as a grammar
        with pytest.raises(LanguageError) as refused:
            compiler.matcher(envelope, context_ref)
        assert message == str(refused.value)


def test_words_that_cannot_spell_a_decision_are_refused(threes: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = threes.piece
    monkeypatch.setattr(threes, "piece", lambda token: piece(token).replace(b"_", b"-"))
    with pytest.raises(LanguageError) as refused:
        GrammarCompiler(threes).matcher(ESCALATE_ONLY, CONTEXT_REF)
    assert "LANGUAGE_UNSPEAKABLE" == refused.value.reason_code
    monkeypatch.setattr(threes, "piece", lambda token: piece(token).replace(b"7", b"8"))
    with pytest.raises(LanguageError, match="no tokens of the model spell `7`"):
        GrammarCompiler(threes)


@pytest.mark.parametrize(
    ("token", "chars", "ended"),
    [(b'","action":"PAY', 5, "rationale"), (b'},"reason":"AA', 0, "amount")],
)
def test_words_that_would_make_a_choice_with_what_ends_a_text_or_number_are_refused(
    token: bytes, chars: int, ended: str
) -> None:
    """Such a choice would be made unseen: without a probability of its own, or a confidence."""
    pay = KindBound("PAY", ("AA", "BB"), (("amount", Bound(0, 999, 1, 0, 2)),))
    envelope = DecisionEnvelope((KindBound("DENY", ("NO",), ()), pay), chars)
    with pytest.raises(LanguageError, match=f"the token that ends `{ended}` would also decide what follows") as refused:
        GrammarCompiler(Longest([token])).matcher(envelope, CONTEXT_REF)
    assert "LANGUAGE_UNSPEAKABLE" == refused.value.reason_code
    GrammarCompiler(Longest([])).matcher(envelope, CONTEXT_REF)


class Longest:
    """Every byte is a token, and some texts are: the longest that fits is taken."""

    def __init__(self, texts: list[bytes]) -> None:
        self._pieces = [*(bytes([byte]) for byte in range(256)), *texts]
        self.vocab_size = len(self._pieces)

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        found = list[int]()
        while text:
            token = max(
                (token for token, piece in enumerate(self._pieces) if text.startswith(piece)),
                key=lambda token: len(self._pieces[token]),
            )
            found.append(token)
            text = text[len(self._pieces[token]) :]
        return found


def test_the_reasons_of_the_pool_begin_alike() -> None:
    assert any(a != b and b.startswith(a) for a in REASONS for b in REASONS)

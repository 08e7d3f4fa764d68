"""A walk through a plan writes exactly the language, in the tokenizer's own spelling; llguidance is the second opinion."""

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
from sds.grammars.tokens.compiler import PLANS_MAX, GrammarCompiler
from sds.grammars.tokens.selftest import follow
from sds.kernel.envelope.bounds import MAGNITUDE_MAX, Bound, bound
from sds.kernel.envelope.envelope import DENY, ESCALATE_ONLY, DecisionEnvelope, KindBound, envelope_of, format_literal
from sds.kernel.envelope.proposal import TEXT_CHARS
from sds.kernel.errors import LanguageError
from tests.grammars.llguidance_mask import Mask
from tests.grammars.tokenizers import Tokens
from tests.grammars.walks import SMALL, STEPS_MAX, at_random, every_end, pool, some, walked
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
    ends = [*every_end(GrammarCompiler(words).walk(envelope, CONTEXT_REF))]
    assert sorted(decisions(envelope)) == sorted(walk.data for walk in ends)
    assert all(walk.data == b"".join(map(words.piece, walk.tokens)) for walk in ends)


def test_no_walk_leaves_the_mask_and_every_walk_ends_in_the_language(words: Tokens) -> None:
    planner, tokenizer = GrammarCompiler(words), llguidance_tokenizer(words)
    for rng, envelope in pool(20260811, scale(60, 3000)):
        mask, walk = Mask(tokenizer, language(envelope, CONTEXT_REF)), planner.walk(envelope, CONTEXT_REF)
        told = 0
        for _ in range(STEPS_MAX):
            walk.forced()
            mask.advance(walk.tokens[told:])
            told = len(walk.tokens)
            if walk.finished:
                break
            fork, allowed = walk.fork(), mask.allowed()
            assert len(set(fork.tokens.tolist())) == len(fork.tokens) >= 2
            assert allowed[fork.tokens].all(), (envelope, walk.data)
            token = int(rng.choice(fork.tokens))
            walk.take(token)
        assert mask.finished
        assert envelope.contains(walk.data)
        assert walk.data.endswith(f'"context_ref":"{CONTEXT_REF}"}}'.encode())


def test_what_the_mask_permits_besides_is_another_spelling_only(words: Tokens) -> None:
    """Leave the walk at a token that the mask alone permits, let the mask finish: a walk writes these bytes, too."""
    planner, tokenizer = GrammarCompiler(words), llguidance_tokenizer(words)
    left = 0
    for rng, envelope in pool(20260812, scale(40, 1000)):
        mask, walk = Mask(tokenizer, language(envelope, CONTEXT_REF)), planner.walk(envelope, CONTEXT_REF)
        written = b""
        for _ in range(STEPS_MAX):
            if mask.finished:
                break
            allowed = np.flatnonzero(mask.allowed())
            here = walk.data == written
            if here:
                walk.forced()
                here = walk.data == written
            open_ = walk.fork().tokens if here and not walk.finished else allowed
            foreign = np.setdiff1d(allowed, open_)
            left += len(foreign)
            token = int(rng.choice(foreign if len(foreign) and rng.randrange(2) else allowed))
            mask.advance([token])
            written += words.piece(token)
            if here and token in open_.tolist():
                walk.take(token)
        assert envelope.contains(written)
        assert written == follow(planner.walk(envelope, CONTEXT_REF), written), envelope
    assert left


@pytest.mark.parametrize("name", ["embedded", "threes"])
def test_the_tokens_are_those_the_tokenizer_makes_of_the_finished_text(
    name: str, request: pytest.FixtureRequest
) -> None:
    words: Tokens = request.getfixturevalue(name)
    planner = GrammarCompiler(words)
    for rng, envelope in pool(20260813, scale(200, 10_000), rationale=False):
        context_ref = f"{rng.getrandbits(256):064x}"
        walk = walked(planner.walk(envelope, context_ref), at_random(rng))
        assert walk.copy().canonical()
        assert words.tokenize(walk.data, special=False) == walk.tokens, walk.data


def test_a_decision_that_the_tokenizer_would_spell_otherwise_is_not_canonical(words: Tokens) -> None:
    planner = GrammarCompiler(words)
    found = Counter[bool]()
    for rng, envelope in pool(20260815, scale(50, 1000)):
        walk = walked(planner.walk(envelope, CONTEXT_REF), at_random(rng))
        spelled, again = walk.copy().tokens, words.tokenize(walk.data, special=False)
        assert (spelled == again) == walk.canonical()
        assert spelled == walk.tokens
        found[spelled == again] += 1
    assert found[True]
    assert found[False], "free text is written as no tokenizer would"


def test_a_token_outside_the_fork_is_refused_and_changes_nothing(words: Tokens) -> None:
    planner = GrammarCompiler(words)
    for rng, envelope in pool(20260814, scale(25, 500)):
        walk = planner.walk(envelope, CONTEXT_REF)
        for _ in range(STEPS_MAX):
            walk.forced()
            if walk.finished:
                break
            open_, before = walk.fork().tokens.tolist(), (walk.data, walk.tokens.copy())
            outside = {rng.randrange(-2, words.vocab_size + 2) for _ in range(50)} | {words.eos}
            for token in outside.difference(open_):
                with pytest.raises(LanguageError) as refused:
                    walk.take(token)
                assert "MASK_FAILED" == refused.value.reason_code
            assert before == (walk.data, walk.tokens)
            assert open_ == walk.fork().tokens.tolist()
            walk.take(int(rng.choice(open_)))
        for ask in (walk.fork, partial(walk.take, 0)):
            with pytest.raises(LanguageError, match="the decision is finished"):
                ask()


@pytest.mark.parametrize("step", [7, 9973, 10**9 + 7])
def test_a_step_without_a_short_expression_is_walked_all_the_same(embedded: Tokens, step: int) -> None:
    envelope, rng, planner = (
        some(amount=bound(-MAGNITUDE_MAX, MAGNITUDE_MAX, step=step)),
        seeded(1),
        GrammarCompiler(embedded),
    )
    for _ in range(scale(30, 1000)):
        walk = walked(planner.walk(envelope, CONTEXT_REF), at_random(rng))
        assert envelope.contains(walk.data)


@settings(max_examples=scale(100, 5000))
@given(st.data())
def test_a_wider_bound_removes_no_path(embedded: Tokens, data: st.DataObject) -> None:
    pick = lambda lo, hi: data.draw(st.integers(lo, hi))  # noqa: E731
    narrow = random_bound(pick)
    lo, hi = (end + sign * pick(0, 300) * narrow.step for end, sign in ((narrow.lo, -1), (narrow.hi, 1)))
    wide = replace(narrow, lo=lo, hi=hi, residue=narrow.lo % narrow.step)
    planner = GrammarCompiler(embedded)
    walk = walked(planner.walk(some(amount=narrow), CONTEXT_REF), at_random(Random(pick(0, 10**6))))
    wider = planner.walk(some(amount=wide), CONTEXT_REF)
    for token in walk.tokens:
        if not wider.finished:
            wider.take(token)
    assert (walk.data, walk.tokens) == (wider.data, wider.tokens)


@pytest.mark.parametrize("chars", [1, 2, 7, 40])
def test_a_rationale_is_free_text_within_its_limit(words: Tokens, chars: int) -> None:
    planner, rng, lengths = GrammarCompiler(words), seeded(20260815), set[int]()
    for i in range(scale(15, 300)):
        walk = planner.walk(replace(refund_envelope(), rationale_chars_max=chars), CONTEXT_REF)
        walked(walk, lambda fork, i=i: rng.randrange(i % 2, 1 if i % 2 == rng.randrange(9) == 0 else len(fork.tokens)))
        assert walk.data.count(b'"rationale":"') == 1
        assert replace(refund_envelope(), rationale_chars_max=chars).contains(walk.data)
        lengths.add(len(walk.data.split(b'"rationale":"')[1].split(b'"')[0]))
    assert chars in lengths


def test_every_text_that_the_form_permits_can_be_written(words: Tokens) -> None:
    every = "".join(chr(c) for c in range(32, 127) if chr(c) not in '"\\')
    assert 95 - 2 == len(every)
    assert r"[ !#-\[\]-~]" == TEXT_CHARS
    envelope = replace(ESCALATE_ONLY, rationale_chars_max=len(every))
    start = walked(GrammarCompiler(words).walk(envelope, CONTEXT_REF), lambda _: 0).data
    data = start.replace(b'"rationale":""', f'"rationale":"{every}"'.encode())
    assert data != start
    assert data == follow(GrammarCompiler(words).walk(envelope, CONTEXT_REF), data)


def test_a_planner_keeps_few_plans_and_forgets_none_of_the_language(embedded: Tokens) -> None:
    planner, first = GrammarCompiler(embedded), some(amount=bound(1, 9))
    before = {walk.data for walk in every_end(planner.walk(first, CONTEXT_REF))}
    for i in range(PLANS_MAX + 5):
        planner.walk(envelope_of([KindBound(DENY, (f"R{i}",))]), CONTEXT_REF)
    assert PLANS_MAX == len(planner._plans)
    assert before == {walk.data for walk in every_end(planner.walk(first, CONTEXT_REF))}


def test_new_bounds_and_a_new_reference_make_no_new_plan(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = GrammarCompiler(embedded)
    planner.walk(some(amount=bound(1, 900)), CONTEXT_REF)
    monkeypatch.setattr(embedded, "tokenize", None)
    for hi in range(901, 1000):
        walk = planner.walk(some(amount=bound(2, hi)), f"{hi:064x}")
        walk.forced()
        assert "action" == walk.fork().choice


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
        (of_one(), CONTEXT_REF, "a reason code is missing or stands twice"),
        (of_one("A", "A"), CONTEXT_REF, "a reason code is missing or stands twice"),
        (of_one("a"), CONTEXT_REF, "`a` is not a reason code the form can write"),
        (of_one("A", params=(("X", Bound(1, 2, 1, 0, 0)),)), CONTEXT_REF, "`PAY` has parameters the form cannot write"),
        (of_one("A", params=(("x", Bound(3, 4, 10, 7, 0)),)), CONTEXT_REF, "`x` has a bound that holds no value"),
        (of_one("A", params=(("x", Bound(2, 1, 1, 0, 0)),)), CONTEXT_REF, "`x` has a bound that holds no value"),
    ],
)
def test_what_the_form_cannot_write_is_refused(
    embedded: Tokens, envelope: DecisionEnvelope, context_ref: str, message: str
) -> None:
    planner = GrammarCompiler(embedded)
    for _ in range(2):  # a refusal is not kept as a plan
        with pytest.raises(LanguageError) as refused:
            planner.walk(envelope, context_ref)
        assert message == str(refused.value)


def test_words_that_cannot_spell_a_decision_are_refused(threes: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = threes.piece
    monkeypatch.setattr(threes, "piece", lambda token: piece(token).replace(b"_", b"-"))
    with pytest.raises(LanguageError) as refused:
        GrammarCompiler(threes).walk(ESCALATE_ONLY, CONTEXT_REF)
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
    with pytest.raises(
        LanguageError, match=f"the token that ends `{ended}` would make the choice behind it"
    ) as refused:
        GrammarCompiler(Longest([token])).walk(envelope, CONTEXT_REF)
    assert "LANGUAGE_UNSPEAKABLE" == refused.value.reason_code
    GrammarCompiler(Longest([])).walk(envelope, CONTEXT_REF)


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

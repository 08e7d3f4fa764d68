"""Company moves log-probabilities. It may turn a decision into none, never into another one."""

from __future__ import annotations

import math

import pytest

from sds.decoding.decoder import Deciding, Decoded, Mode, deciding
from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import ModelError
from tests.decoding.small_backend import Disturbed, HashBackend, decode, matcher_of, together
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale, seeded
from tests.strategies import random_envelope

PROMPT = [[5, 7], [6]]
NOISE = 0.1
SPREAD = 0.2  # most gaps between the best two are then of the size of the noise
SLOTS = 4
TOKENS_MAX = 2000


def alone(seed: int, envelope: DecisionEnvelope, mode: Mode, slot: int) -> Decoded:
    backend = HashBackend(seed, spread=SPREAD)
    matcher = matcher_of(backend, envelope)
    return decode(backend, [*PROMPT, [slot]], matcher, tokens_max=TOKENS_MAX, mode=mode)


def beside(backend: HashBackend, envelope: DecisionEnvelope, mode: Mode, slot: int, noise: float) -> Deciding:
    matcher = matcher_of(backend, envelope)
    return deciding(
        backend, slot, [*PROMPT, [slot]], matcher, tokens_max=TOKENS_MAX, mode=mode, noise_logp_max=noise, forks_max=5
    )


def in_company(seed: int, envelopes: list[DecisionEnvelope], mode: Mode, noise: float) -> list[Decoded | ModelError]:
    backend = Disturbed(seed, noise_logp_max=NOISE, slots=SLOTS, spread=SPREAD)
    found = together(backend, [beside(backend, one, mode, slot, noise) for slot, one in enumerate(envelopes)])
    assert 0 == backend.forks_held
    return found


def crafted(mode: Mode, noise: float, seed: int, rounds: int) -> tuple[int, int, int]:
    """Return how many decisions were the same alone and in company, how many none, how many others."""
    same = none = other = 0
    rng = seeded(seed)
    for number in range(rounds):
        envelopes = [random_envelope(rng.randint) for _ in range(SLOTS)]
        for slot, found in enumerate(in_company(number, envelopes, mode, noise)):
            if isinstance(found, ModelError):
                assert CHOICE_TOO_CLOSE == found.reason_code
                assert "are closer than the model's noise" in str(found)
                none += 1
            elif found.data == alone(number, envelopes[slot], mode, slot).data:
                same += 1
            else:
                other += 1
    return same, none, other


@pytest.mark.parametrize("mode", ["greedy", "exact"])
def test_company_turns_a_near_tie_into_no_decision_and_never_into_another(mode: Mode):
    same, none, other = crafted(mode, NOISE, 51, scale(40, 2500))
    print(f"{mode}: {same} the same, {none} too close")
    assert 0 == other
    assert same
    assert none


@pytest.mark.parametrize("mode", ["greedy", "exact"])
def test_without_the_margin_company_would_change_decisions(mode: Mode):
    """The near-ties are near enough for the test above to mean something."""
    _, none, other = crafted(mode, 0.0, 51, 20)
    assert (0, True) == (none, other > 0)


@pytest.mark.parametrize("mode", ["greedy", "exact"])
def test_confidence_in_company_is_never_more_than_it_is_alone(mode: Mode):
    """Or a contract's `confidence_min_pct` would let through in company what it hands to a human otherwise."""
    rng, met, moved = seeded(53), 0, 0
    for seed in range(scale(25, 1000)):
        envelopes = [random_envelope(rng.randint) for _ in range(SLOTS)]
        found = in_company(seed, envelopes, mode, NOISE), in_company(seed, envelopes, mode, 0.0)
        for slot, (guarded, raw) in enumerate(zip(*found, strict=True)):
            if isinstance(guarded, Decoded) and isinstance(raw, Decoded):
                by_itself = alone(seed, envelopes[slot], mode, slot).confidence
                assert guarded.confidence <= by_itself
                met += by_itself < 1
                moved += raw.confidence > by_itself
    assert moved  # what it would be without the margin
    assert met > moved


def test_a_perfect_tie_without_noise_is_decided_by_order():
    backend = HashBackend(0, spread=0.0)
    rng = seeded(52)
    for _ in range(50):
        envelope = random_envelope(rng.randint)
        matcher = matcher_of(backend, envelope)
        found = decode(backend, PROMPT, matcher, tokens_max=TOKENS_MAX)
        assert envelope.names[0].encode() in found.data


@pytest.mark.parametrize("mode", ["greedy", "exact"])
def test_just_under_the_gap_of_the_best_two_noise_is_no_objection(mode: Mode):
    """A whole text has the noise of each of its tokens."""
    envelope = envelope_of([KindBound(DENY, ("NO",))])
    backend = HashBackend(7)
    compiler = GrammarCompiler(backend)
    matcher = compiler.matcher(envelope, CONTEXT_REF)
    matcher.accept_forced()
    tokens = [1, 1] if mode == "greedy" else [len(text) for _, text in matcher.alternatives()]

    def decided(noise: float) -> Decoded:
        again = compiler.matcher(envelope, CONTEXT_REF)
        (found,) = together(
            backend, [deciding(backend, 0, PROMPT, again, tokens_max=TOKENS_MAX, mode=mode, noise_logp_max=noise)]
        )
        if isinstance(found, ModelError):
            raise found
        return found

    (action,) = decided(0.0).choices
    best, second = sorted((share for _, share in action.probabilities), reverse=True)
    margin = math.log(best / second) / sum(tokens)
    assert action == decided(margin * 0.999).choices[0]
    with pytest.raises(ModelError, match="the two likeliest options of `action` are closer than the model's noise"):
        decided(margin * 1.001)

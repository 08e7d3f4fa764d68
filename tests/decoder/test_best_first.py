"""In exact mode a number of too many values to be listed is the likeliest of all, not the one of the likeliest digits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sds.best_first import BEGINNINGS_MAX
from sds.decoder import CHOICE_TOO_CLOSE, Decoded, Mode, deciding
from sds.grammars.plan import Planner, Walk
from sds.kernel.bounds import Bound, bound
from sds.kernel.envelope import DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import ModelError
from sds.kernel.proposal import Proposal, parse_proposal
from tests.decoder.reference import Look, looking
from tests.decoder.small_backend import HashBackend, together
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale, seeded

PROMPT = [[5, 7], [6]]
FLAT = 0.01


def paying(amount: Bound) -> DecisionEnvelope:
    """Everything but the amount is forced."""
    return replace(envelope_of([]), kinds=(KindBound("PAY", ("YES",), (("amount", amount),)),))


def decided(
    backend: HashBackend, envelope: DecisionEnvelope, mode: Mode = "exact", noise: float = 0.0, forks_max: int = 16
) -> Decoded:
    walk = Planner(backend).walk(envelope, CONTEXT_REF)
    run = deciding(backend, 0, PROMPT, walk, tokens_max=400, mode=mode, noise_logp_max=noise, forks_max=forks_max)
    (found,) = together(backend, [run])
    assert 0 == backend.forks_held
    if isinstance(found, ModelError):
        raise found
    return found


def amount_of(found: Decoded) -> str:
    proposal = parse_proposal(found.data)
    assert isinstance(proposal, Proposal)
    return dict(proposal.params)["amount"]


def every_number(look: Look, walk: Walk) -> dict[str, float]:
    """Return the log-probability of every number that `walk` can write, each spelled out alone."""
    fork, found = walk.fork(), dict[str, float]()

    def write(here: Walk, logp: float) -> None:
        for token in map(int, here.fork().tokens):
            after, cost = here.copy(), look(here.tokens)[token]
            after.take(token)
            written = len(after.tokens)
            after.forced()
            if after.finished or after.fork().start != fork.start:
                literal = after.data[fork.start :].split(b"}")[0].decode()
                found[literal] = max(found.get(literal, -math.inf), logp + cost)
            else:
                forced = [look(after.tokens[:i])[after.tokens[i]] for i in range(written, len(after.tokens))]
                write(after, logp + cost + math.fsum(forced))

    write(walk, 0.0)
    return found


def random_amount(low: int, high: int, step: int, scaled: int) -> Bound:
    amount = bound(low, high, step=step, scale=scaled)
    assert amount is not None
    return amount


@pytest.mark.parametrize("scaled", [0, 2])
def test_it_is_the_likeliest_of_all_numbers_each_spelled_out(scaled: int):
    rng = seeded(61)
    traps = 0
    for seed in range(scale(25, 300)):
        low = rng.randint(-150, 900)
        envelope = paying(random_amount(low, low + rng.randint(200, 600), rng.randint(1, 3), scaled))
        backend = HashBackend(seed, spread=8.0)
        walk = Planner(backend).walk(envelope, CONTEXT_REF)
        walk.forced()
        scores = every_number(looking(backend, PROMPT), walk)
        found = amount_of(decided(backend, envelope))
        assert max(scores, key=lambda literal: scores[literal]) == found
        traps += found != amount_of(decided(backend, envelope, "greedy"))
    assert traps  # digit by digit it would often be another


def test_it_is_found_with_any_number_of_forks_and_tells_the_same():
    envelope = paying(random_amount(1, 99_999, 1, 2))
    for seed in range(20):
        wanted = decided(HashBackend(seed, spread=8.0), envelope)
        for forks_max in (3, 4, 7):
            backend = HashBackend(seed, spread=8.0)
            found = decided(backend, envelope, forks_max=forks_max)
            assert (wanted.data, wanted.choices) == (found.data, found.choices)
            assert backend.forks_held_max <= forks_max


def test_each_digit_has_its_distribution_though_it_was_not_chosen_for_it():
    envelope = paying(random_amount(1_000, 9_999, 1, 2))
    backend = HashBackend(5, spread=8.0)
    found = decided(backend, envelope)
    literal = amount_of(found)
    walk = Planner(backend).walk(envelope, CONTEXT_REF)
    walk.forced()
    for choice in found.choices:
        assert choice.name.startswith("amount[")
        place = int(choice.name.removeprefix("amount[").removesuffix("]"))
        assert literal[place : place + 1] == choice.chosen
        assert pytest.approx(1.0) == sum(share for _, share in choice.probabilities)
    first = looking(backend, PROMPT)(walk.tokens)
    digits = {str(n): math.exp(first[ord(str(n))]) for n in range(1, 10)}
    shares = {label: share / sum(digits.values()) for label, share in digits.items()}
    assert pytest.approx(shares, abs=1e-6) == dict(found.choices[0].probabilities)


def test_a_model_without_a_preference_is_followed_digit_by_digit_after_a_bounded_search():
    envelope = paying(random_amount(1, 99_999_999, 1, 2))
    backend = HashBackend(3, spread=FLAT)
    found = decided(backend, envelope)
    assert amount_of(decided(HashBackend(3, spread=FLAT), envelope, "greedy")) == amount_of(found)
    assert BEGINNINGS_MAX < sum(rows for _, rows in found.rows) < 5 * BEGINNINGS_MAX


def test_a_search_that_noise_might_have_cut_short_decides_nothing():
    envelope = paying(random_amount(1, 99_999_999, 1, 2))
    with pytest.raises(ModelError, match="the best two of `amount` are closer") as caught:
        decided(HashBackend(3, spread=FLAT), envelope, noise=1e-9)
    assert CHOICE_TOO_CLOSE == caught.value.reason_code


def test_just_under_the_gap_to_the_second_noise_is_no_objection():
    envelope = paying(random_amount(1_000, 1_400, 1, 0))
    backend = HashBackend(9, spread=8.0)
    walk = Planner(backend).walk(envelope, CONTEXT_REF)
    walk.forced()
    scores = sorted(every_number(looking(backend, PROMPT), walk).values(), reverse=True)
    wanted = decided(HashBackend(9, spread=8.0), envelope).data
    gap = scores[0] - scores[1]
    assert wanted == decided(HashBackend(9, spread=8.0), envelope, noise=gap / 100).data
    with pytest.raises(ModelError, match="closer"):
        decided(HashBackend(9, spread=8.0), envelope, noise=gap)

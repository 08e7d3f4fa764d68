"""What may be chosen next is read along: fewer passes, the same decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sds.decoder import Decoded, Mode, deciding
from sds.grammars.plan import Planner
from sds.kernel.bounds import Bound
from sds.kernel.envelope import DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import ModelError
from tests.decoder.small_backend import Disturbed, HashBackend, together
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale, seeded
from tests.strategies import random_envelope

PROMPT = [[5, 7], [6]]
AHEAD = 64
AMOUNT = Bound(0, 99_999, 1, 0, 2)


def decided(backend: HashBackend, envelope: DecisionEnvelope, mode: Mode = "greedy", forks_max: int = 63) -> Decoded:
    walk = Planner(backend).walk(envelope, CONTEXT_REF)
    (found,) = together(backend, [deciding(backend, 0, PROMPT, walk, tokens_max=400, mode=mode, forks_max=forks_max)])
    assert 0 == backend.forks_held
    assert isinstance(found, Decoded), found
    return found


def without_passes(found: Decoded) -> Decoded:
    return replace(found, passes=0, rows=())


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds", "exact"])
def test_reading_ahead_decides_the_same_with_the_same_probabilities(mode: Mode):
    rng = seeded(31)
    fewer = 0
    for seed in range(scale(60, 2000)):
        envelope = random_envelope(rng.randint)
        plain = decided(HashBackend(seed), envelope, mode)
        ahead = decided(HashBackend(seed, ahead_tokens_max=rng.choice([3, 12, AHEAD])), envelope, mode)
        assert without_passes(plain) == without_passes(ahead)
        assert plain.passes >= ahead.passes
        fewer += plain.passes > ahead.passes
    assert (fewer > 0) == (mode != "exact")


def test_a_number_takes_half_the_passes():
    envelope = replace(envelope_of([]), kinds=(KindBound("PAY", ("YES",), (("amount", AMOUNT),)),))
    plain, ahead = (decided(HashBackend(3, ahead_tokens_max=tokens), envelope) for tokens in (0, AHEAD))
    assert plain.data == ahead.data
    assert plain.passes // 2 <= ahead.passes <= plain.passes // 2 + 1 < plain.passes


def test_no_more_is_read_ahead_than_the_backend_reads_for_nothing():
    rng = seeded(32)
    for seed in range(scale(40, 1000)):
        envelope, most = random_envelope(rng.randint), rng.randint(1, 20)
        backend = HashBackend(seed, ahead_tokens_max=most)
        decided(backend, envelope)
        for rows in backend.passes:
            own = len(rows[0].tokens)
            assert most >= sum(len(row.tokens) - own for row in rows[1:])
            assert backend.pass_tokens_max >= sum(len(row.tokens) for row in rows)


@pytest.mark.parametrize(("slots", "forks_max"), [(8, 63), (32, 16), (1, 5), (1, 3)])
def test_forks_are_never_more_than_a_slot_may_have(slots: int, forks_max: int):
    rng = seeded(33)
    for seed in range(scale(20, 500)):
        backend = HashBackend(seed, slots=slots, ahead_tokens_max=AHEAD)
        decided(backend, random_envelope(rng.randint), forks_max=forks_max)
        assert min(forks_max, 63 // slots) >= backend.forks_held_max


def test_many_that_read_ahead_together_each_decide_as_alone():
    rng = seeded(34)
    for seed in range(scale(20, 500)):
        envelopes = [random_envelope(rng.randint) for _ in range(4)]
        backend = HashBackend(seed, slots=4, ahead_tokens_max=AHEAD)
        walks = [Planner(backend).walk(envelope, CONTEXT_REF) for envelope in envelopes]
        runs = [deciding(backend, slot, PROMPT, walk, tokens_max=400) for slot, walk in enumerate(walks)]
        expected = [decided(HashBackend(seed), envelope).data for envelope in envelopes]
        assert expected == [found.data for found in together(backend, runs) if isinstance(found, Decoded)]
        assert 0 == backend.forks_held


def test_near_ties_escalate_also_where_they_were_read_ahead():
    rng = seeded(35)
    close = 0
    for seed in range(scale(60, 2000)):
        envelope = random_envelope(rng.randint)
        plain = decided(HashBackend(seed, spread=0.3), envelope).data
        backend = Disturbed(seed, noise_logp_max=0.05, spread=0.3, ahead_tokens_max=AHEAD)
        walk = Planner(backend).walk(envelope, CONTEXT_REF)
        run = deciding(backend, 0, PROMPT, walk, tokens_max=400, noise_logp_max=0.05)
        (found,) = together(backend, [run])
        assert isinstance(found, ModelError) or plain == found.data
        close += isinstance(found, ModelError)
    assert close > 0

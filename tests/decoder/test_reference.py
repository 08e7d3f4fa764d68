"""The decoder against the slow reference: every text alone, token by token, every share in Python floats."""

from __future__ import annotations

import pytest

from sds.decoder import Decoded, Mode, decode
from sds.grammars.plan import Planner
from sds.kernel.envelope import DecisionEnvelope
from sds.models.protocol import Backend
from tests.decoder.reference import Slow, looking, slow_decision
from tests.decoder.small_backend import HashBackend
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale, seeded
from tests.strategies import random_envelope

PROMPT = [[300 - 9, 5, 7], [6], [8, 9]]
MODES: tuple[Mode, ...] = ("greedy", "exact")


def both(backend: Backend, envelope: DecisionEnvelope, mode: Mode, prompt: list[list[int]]) -> tuple[Decoded, Slow]:
    planner = Planner(backend)
    decoded = decode(
        backend,
        prompt,
        planner.walk(envelope, CONTEXT_REF),
        tokens_max=2000,
        now_ms=lambda: 0,
        deadline_ms=0,
        mode=mode,
    )
    return decoded, slow_decision(looking(backend, prompt), planner.walk(envelope, CONTEXT_REF), mode)


def assert_equal(decoded: Decoded, slow: Slow, tolerance: float) -> None:
    assert slow.data == decoded.data
    assert [name for name, *_ in slow.choices] == [choice.name for choice in decoded.choices]
    for (name, shares, chosen, z), choice in zip(slow.choices, decoded.choices, strict=True):
        assert chosen == choice.chosen, name
        assert pytest.approx(shares, abs=tolerance) == dict(choice.probabilities), name
        assert pytest.approx(z, abs=tolerance) == choice.z, name


@pytest.mark.parametrize("mode", MODES)
def test_shares_and_decisions_are_those_of_the_reference(mode: Mode):
    rng = seeded(41)
    for seed in range(scale(30, 1000)):
        backend = HashBackend(seed)
        envelope = random_envelope(rng.randint)
        decoded, slow = both(backend, envelope, mode, PROMPT)
        assert envelope.contains(decoded.data)
        assert_equal(decoded, slow, 1e-9)
        assert 0 == backend.forks_held

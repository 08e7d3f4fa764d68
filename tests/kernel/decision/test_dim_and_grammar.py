"""The module that judges and the language that is sampled are two implementations of one set."""

from __future__ import annotations

import re
from dataclasses import replace

from sds.grammars.language import language
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim
from sds.kernel.decision.packet import Decoding
from sds.kernel.envelope.proposal import write_proposal
from tests.kernel import world
from tests.samples import inside, mutated
from tests.scale import scale, seeded
from tests.strategies import random_envelope

SAMPLES_EACH = 50


def test_the_dim_lets_through_exactly_what_the_grammar_can_say() -> None:
    """Of 20,000 samples, half inside and half bent: no objection from any gate, exactly when the expression matches."""
    rng, asked, passed = seeded(20261122), 0, 0
    terms: Contract = world.contract()
    calm = world.packet(terms)
    while asked < scale(8_000, 200_000):
        packet = replace(calm, envelope=random_envelope(rng.randint))
        standing, reference = world.standing(packet), packet.snapshot.id
        matches = re.compile(language(packet.envelope, reference).regex().encode()).fullmatch
        for number in range(SAMPLES_EACH):
            bent = number % 2
            data = mutated(rng, packet.envelope, reference) if bent else b""
            data = data or write_proposal(inside(rng, packet.envelope, reference))
            verdict = dim.judge(terms, packet, data, standing, Decoding("m", 1.0), world.NOW_MS)
            assert bool(matches(data)) == (verdict.outcome != "REJECTED"), (packet.envelope, data, verdict.reasons)
            asked, passed = asked + 1, passed + (verdict.outcome != "REJECTED")
    assert asked // 2 <= passed <= asked * 3 // 4

"""No model can get out: whatever the logits say, a decision is inside its envelope or there is none."""

from __future__ import annotations

from contextlib import closing
from random import Random

import pytest

from sds.decoding.decoder import Mode
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.models.protocol import Backend
from tests.decoding.small_backend import decode
from tests.hostile import PROMPT, WISHES, AdversarialBackend
from tests.model_fixtures import model_in
from tests.scale import scale, seeded
from tests.strategies import random_envelope

CHECKPOINTS = (101, 102, 103, 104)
HF_CHECKPOINTS = (101, 105)
DECISIONS = scale(240, 100_000) // (len(CHECKPOINTS) + len(WISHES)) + 1
HF_DECISIONS = scale(8, DECISIONS)
TOKENS_MAX = 1000  # more than the longest sentence of the pool has bytes of text and digits
EXACT_SHARE = 0.1


def assert_decides_inside(backend: Backend, compiler: GrammarCompiler, rng: Random) -> None:
    envelope, context_ref = random_envelope(rng.randint), f"{rng.getrandbits(256):064x}"
    if isinstance(backend, AdversarialBackend):
        backend.face(compiler.matcher(envelope, context_ref))
    mode: Mode = "exact" if rng.random() < EXACT_SHARE else "greedy"
    result = decode(backend, PROMPT, compiler.matcher(envelope, context_ref), tokens_max=TOKENS_MAX, mode=mode)
    proposal = parse_proposal(result.data)
    assert isinstance(proposal, Proposal), result.data
    assert context_ref == proposal.context_ref
    assert [] == envelope.objections(proposal), (envelope, result.data)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("library", "seed", "decisions"),
    [*(("llama", seed, DECISIONS) for seed in CHECKPOINTS), *(("hf", seed, HF_DECISIONS) for seed in HF_CHECKPOINTS)],
)
def test_a_random_model_never_leaves_the_envelope(
    library: str, seed: int, decisions: int, request: pytest.FixtureRequest
):
    """Through transformers, a random checkpoint folder."""
    rng, path_of = seeded(seed), request.getfixturevalue("tiny_folder" if library == "hf" else "tiny_path")
    with closing(model_in(library, path_of(seed))) as backend:
        compiler = GrammarCompiler(backend)
        for _ in range(decisions):
            assert_decides_inside(backend, compiler, rng)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("library", ["tiny", "tiny_hf"])
def test_a_model_that_wants_something_else_never_leaves_the_envelope(
    wish: str, library: str, request: pytest.FixtureRequest
):
    tiny: Backend = request.getfixturevalue(library)
    rng = seeded(list(WISHES).index(wish))
    backend = AdversarialBackend(tiny, WISHES[wish], seed=rng.randrange(2**32))
    compiler = GrammarCompiler(backend)
    for _ in range(DECISIONS if library == "tiny" else HF_DECISIONS):
        assert_decides_inside(backend, compiler, rng)

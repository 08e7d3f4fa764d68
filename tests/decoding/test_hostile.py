"""No model can get out: whatever the logits say, a decision is inside its envelope or there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from sds.decoding.decoder import Mode, decode
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend
from tests.hostile import PROMPT, WISHES, AdversarialBackend
from tests.model_fixtures import TINY_THREADS
from tests.scale import scale, seeded
from tests.strategies import random_envelope

CHECKPOINTS = (101, 102, 103, 104)
HF_CHECKPOINTS = (101, 105)
DECISIONS = scale(2_000, 100_000) // (len(CHECKPOINTS) + len(WISHES)) + 1
HF_DECISIONS = scale(30, DECISIONS)
TOKENS_MAX = 1000  # more than the longest sentence of the pool has bytes of text and digits
EXACT_SHARE = 0.1
DEADLINE_MS = 60_000  # a hang, not a limit on speed


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def assert_decides_inside(backend: Backend, compiler: GrammarCompiler, rng: Random) -> None:
    envelope, context_ref = random_envelope(rng.randint), f"{rng.getrandbits(256):064x}"
    if isinstance(backend, AdversarialBackend):
        backend.face(compiler.matcher(envelope, context_ref))
    mode: Mode = "exact" if rng.random() < EXACT_SHARE else "greedy"
    result = decode(
        backend,
        PROMPT,
        compiler.matcher(envelope, context_ref),
        tokens_max=TOKENS_MAX,
        now_ms=monotonic_ms,
        deadline_ms=monotonic_ms() + DEADLINE_MS,
        mode=mode,
    )
    proposal = parse_proposal(result.data)
    assert isinstance(proposal, Proposal), result.data
    assert context_ref == proposal.context_ref
    assert [] == envelope.objections(proposal), (envelope, result.data)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", CHECKPOINTS)
def test_a_random_model_never_leaves_the_envelope(seed: int, tiny_path: Callable[[int], Path]):
    rng = seeded(seed)
    backend = LlamaBackend(tiny_path(seed), threads=TINY_THREADS)
    compiler = GrammarCompiler(backend)
    for _ in range(DECISIONS):
        assert_decides_inside(backend, compiler, rng)
    backend.close()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", HF_CHECKPOINTS)
def test_a_random_checkpoint_folder_never_leaves_the_envelope(seed: int, tiny_folder: Callable[[int], Path]):
    from sds.models.transformers_.backend import HfBackend

    rng = seeded(seed)
    backend = HfBackend(tiny_folder(seed), threads=TINY_THREADS)
    compiler = GrammarCompiler(backend)
    for _ in range(HF_DECISIONS):
        assert_decides_inside(backend, compiler, rng)
    backend.close()


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

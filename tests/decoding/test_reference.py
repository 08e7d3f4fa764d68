"""The decoder against the slow reference: every text alone, token by token, every share in Python floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.decoding.decoder import Decoded, Mode
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend, Row
from sds.models.tokenizer.tokenizer import prompt_sections
from tests.decoding.reference import CaseView, Slow, log_probabilities, looking, slow_decision
from tests.decoding.small_backend import HashBackend, decode
from tests.model_fixtures import CONTEXT_REF
from tests.questions import real_packets
from tests.scale import scale, seeded
from tests.strategies import random_envelope

PACKETS = scale(1, 200)
BESIDES = ("tiny_hf", "tiny_vino") if scale(1, 0) else ("own_hf", "own_vino")  # the embedded weights, or a tiny model
PROMPT = [[300 - 9, 5, 7], [6], [8, 9]]
MODES: tuple[Mode, ...] = ("greedy", "exact-kinds", "exact")


def both(
    backend: Backend, envelope: DecisionEnvelope, mode: Mode, prompt: list[list[int]], look: CaseView | None = None
) -> tuple[Decoded, Slow]:
    compiler = GrammarCompiler(backend)
    backend.prefill([])
    decoded = decode(
        backend,
        prompt,
        compiler.matcher(envelope, CONTEXT_REF),
        tokens_max=2000,
        mode=mode,
    )
    return decoded, slow_decision(look or looking(backend, prompt), compiler.matcher(envelope, CONTEXT_REF), mode)


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
    for seed in range(scale(12, 1000)):
        backend = HashBackend(seed)
        envelope = random_envelope(rng.randint)
        decoded, slow = both(backend, envelope, mode, PROMPT)
        assert envelope.contains(decoded.data)
        assert_equal(decoded, slow, 1e-7)
        assert 0 == backend.forks_held


@pytest.fixture(scope="module")
def packets(tmp_path_factory: pytest.TempPathFactory) -> list[DecisionPacket]:
    return real_packets(tmp_path_factory.mktemp("refund"), PACKETS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("which", "tolerance"), [*((each, 1e-3) for each in BESIDES), ("own_int", 1e-6)])
def test_real_packets_are_decided_as_by_the_reference(
    which: str, tolerance: float, mode: Mode, packets: list[DecisionPacket], request: pytest.FixtureRequest
):
    """In single precision; sums of integer passes are exact: however a text is cut, the logits have the same bits."""
    backend: Backend = request.getfixturevalue(which)
    for packet in packets:
        decoded, slow = both(backend, packet.envelope, mode, prompt_sections(backend, *packet.texts))
        assert_equal(decoded, slow, tolerance)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_llama_cpp_decides_real_packets_as_the_reference_that_sees_the_same_passes(
    mode: Mode, embedded: LlamaBackend, packets: list[DecisionPacket]
):
    """The reference looks up what was read where the decoder read it, and takes nothing else from the decoder."""
    for packet in packets:
        prompt = prompt_sections(embedded, *packet.texts)
        recorder = Recording(embedded)
        decoded, slow = both(recorder, packet.envelope, mode, prompt, recorder.seen(prompt))
        assert packet.envelope.contains(decoded.data.replace(CONTEXT_REF.encode(), packet.snapshot.id.encode()))
        assert_equal(decoded, slow, 1e-6)


class Recording:
    """A real model that remembers its logits by everything that was written before them."""

    def __init__(self, real: Backend) -> None:
        self._real = real
        self._written: dict[int, list[int]] = {}
        self._seen: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def prefill(self, sections: list[list[int]], *, slot: int = 0) -> None:
        self._real.prefill(sections, slot=slot)
        self._written[slot] = [token for section in sections for token in section]

    def fork(self, slot: int) -> int:
        fork = self._real.fork(slot)
        self._written[fork] = list(self._written[slot])
        return fork

    def run(self, rows: list[Row]) -> list[NDArray[np.float32]]:
        found = self._real.run(rows)
        for row, logits in zip(rows, found, strict=True):
            self._written[row.slot] += row.tokens
            written = self._written[row.slot]
            for back in range(row.outputs):
                key = tuple(written[: len(written) - back])
                self._seen.setdefault(key, logits[row.outputs - 1 - back])
        return found

    def seen(self, prompt: list[list[int]]) -> CaseView:
        before = [token for section in prompt for token in section]
        return lambda written: log_probabilities(self._seen[*before, *written])

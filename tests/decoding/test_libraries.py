"""Several libraries on the same weights decide the same, or their own rounding explains why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sds.decoding.decoder import ACTION_CHOICE
from sds.decoding.probabilities import JOINT
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.decision.packet import DecisionPacket
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend
from sds.models.tokenizer.tokenizer import prompt_sections
from tests.decoding.small_backend import decode
from tests.model_fixtures import CONTEXT_REF, TINY_THREADS, refund_envelope
from tests.questions import real_packets
from tests.scale import scale

PACKETS = scale(2, 200)
NOISE_MAX = 0.1  # of a log-probability; where two libraries differ by more, one of them is wrong
TOKENS_MAX = 1000

Shares = Mapping[str, float]
Choice = tuple[str, Shares]


@pytest.fixture(scope="module")
def packets(tmp_path_factory: pytest.TempPathFactory) -> list[DecisionPacket]:
    return real_packets(tmp_path_factory.mktemp("refund"), PACKETS)


def choice_of(backend: Backend, packet: DecisionPacket) -> Choice:
    """Return the action that is decided, and the probability of every action."""
    decoded = decode(
        backend,
        prompt_sections(backend, *packet.texts),
        GrammarCompiler(backend).matcher(packet.envelope, packet.snapshot.id),
        tokens_max=TOKENS_MAX,
    )
    action = next(choice for choice in decoded.choices if choice.name == ACTION_CHOICE)
    return action.chosen, dict(action.probabilities)


def noise_of(pairs: list[tuple[Choice, Choice]]) -> float:
    """Return the largest difference of a log-probability where both decide the same."""
    return max(
        abs(math.log(one[label]) - math.log(other[label]))
        for (mine, one), (theirs, other) in pairs
        if mine == theirs
        for label in one.keys() & other.keys()
    )


def gap(shares: Shares, chosen: str, instead: str) -> float:
    """Return by how much `chosen` was preferred to `instead`, which may have been put aside together with others."""
    beside = next(share for label, share in shares.items() if instead in label.split(JOINT))
    return math.log(shares[chosen]) - math.log(beside)


def unexplained(pairs: list[tuple[Choice, Choice]]) -> Iterator[tuple[str, str, float]]:
    """Yield what differs although one of the two preferred its action by more than twice the noise."""
    noise = noise_of(pairs)
    for (mine, one), (theirs, other) in pairs:
        if mine != theirs:
            preferred = max(gap(one, mine, theirs), gap(other, theirs, mine))
            if preferred >= 2 * noise:
                yield mine, theirs, preferred


@pytest.fixture(scope="module")
def of_llama_cpp(own_gguf: Path, packets: list[DecisionPacket]) -> list[Choice]:
    llama = LlamaBackend(own_gguf, threads=TINY_THREADS)
    choices = [choice_of(llama, packet) for packet in packets]
    llama.close()
    return choices


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", ["own_hf", "own_vino"])
def test_llama_cpp_and_another_library_decide_the_same_on_real_packets(
    which: str, of_llama_cpp: list[Choice], packets: list[DecisionPacket], request: pytest.FixtureRequest
):
    other: Backend = request.getfixturevalue(which)
    pairs = [(mine, choice_of(other, packet)) for mine, packet in zip(of_llama_cpp, packets, strict=True)]
    differ = sum(mine[0] != theirs[0] for mine, theirs in pairs)
    actions = sorted({mine[0] for mine, _ in pairs})
    print(f"{len(pairs)} packets, actions {actions}, {differ} differ, noise {noise_of(pairs):.4f}")
    assert PACKETS == len(pairs)
    assert noise_of(pairs) < NOISE_MAX
    assert [] == list(unexplained(pairs))


SAME = (("PAY", {"PAY": 0.50, "DENY|HOLD": 0.50}), ("PAY", {"PAY": 0.505, "DENY|HOLD": 0.495}))


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"PAY": 0.499, "DENY": 0.501}, 0),
        ({"PAY": 0.40, "DENY": 0.60}, 1),
    ],
)
def test_a_difference_beyond_the_noise_is_not_explained(theirs: Shares, expected: int):
    mine = ("PAY", {"PAY": 0.501, "DENY": 0.499})
    assert expected == len(list(unexplained([SAME, (mine, ("DENY", theirs))])))


@pytest.mark.parametrize("which", ["tiny_hf", "tiny_vino"])
def test_all_libraries_give_the_same_walks(which: str, tiny: LlamaBackend, request: pytest.FixtureRequest):
    backends: tuple[Backend, ...] = tiny, request.getfixturevalue(which)
    ours, theirs = (GrammarCompiler(backend).matcher(refund_envelope(), CONTEXT_REF) for backend in backends)
    assert ours.accept_forced() == theirs.accept_forced()
    while not ours.finished:
        permitted = ours.choice_point().tokens
        assert permitted.tolist() == theirs.choice_point().tokens.tolist()
        for matcher in (ours, theirs):
            matcher.accept(int(permitted[-1]))
        assert ours.accept_forced() == theirs.accept_forced()
    assert theirs.finished

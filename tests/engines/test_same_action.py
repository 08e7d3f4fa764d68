"""The same weights, driven greedily by ours and by others, choose the same action, or it is known why not.

Ours writes as the model's own tokenizer spells, others take the likeliest token of any spelling; and llama.cpp's grammar
lets a model spell even what is forced as it likes, which then is what it reads. So another action is explained by a gap
within the noise of batch shapes, or by a plain greedy decision over our own logits, masked as theirs, that ends there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sds.decoding.decoder import ACTION_CHOICE
from sds.engines.native import NativeEngine
from sds.engines.protocol import Engine
from sds.engines.text import TextEngine
from sds.grammars.language import language
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.text.outlines import OutlinesWriter, drive
from sds.models.text.servers import RemoteWriter
from sds.models.tokenizer.tokenizer import prompt_sections
from tests.decoding.reference import greedy_action, looking, normalised
from tests.engines.conftest import running_ms
from tests.engines.servers import LlamaServer
from tests.kernel.durable import World
from tests.model_fixtures import TINY_THREADS
from tests.questions import real_packets
from tests.scale import scale

PACKETS = scale(1, 200)
NOISE_MAX = 0.1  # of a log-probability; where batch shapes differ by more, one of them is wrong
TOKENS_MAX = 4096
TIMEOUT_MS = 600_000
NONCE = "5eed" * 16


@dataclass(frozen=True)
class Ours:
    """One packet natively: the action, its share and those of the others, and the same shares in plain passes."""

    packet: DecisionPacket
    action: str
    shares: Mapping[str, float]
    plain: Mapping[str, float]

    @property
    def noise(self) -> float:
        return max(abs(math.log(self.shares[label]) - math.log(self.plain[label])) for label in self.plain)


def proposed(engine: Engine, packet: DecisionPacket) -> tuple[str, tuple[Mapping[str, object], ...] | None]:
    """Return the action that an engine decides, a legal one, and what it measured."""
    data, measured = engine.propose(replace(packet, expires_at_ms=running_ms() + TIMEOUT_MS), tokens_max=TOKENS_MAX)
    proposal = parse_proposal(data)
    assert isinstance(proposal, Proposal), data
    assert [] == packet.envelope.objections(proposal)
    assert packet.snapshot.id == proposal.context_ref
    return proposal.action, measured.alternatives


@pytest.fixture(scope="module")
def native(own_gguf: Path) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(own_gguf, threads=TINY_THREADS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def ours(native: LlamaBackend, tmp_path_factory: pytest.TempPathFactory) -> list[Ours]:
    engine = NativeEngine(native, now_ms=running_ms)
    packets = real_packets(tmp_path_factory.mktemp("refund"), PACKETS)
    return [decided(engine, native, packet) for packet in packets]


def decided(engine: NativeEngine, backend: LlamaBackend, packet: DecisionPacket) -> Ours:
    """Decide natively; then measure the first choice once more: the whole prompt in one batch, what follows token by token."""
    action, choices = proposed(engine, packet)
    shares = next(choice["probabilities"] for choice in choices or () if choice["choice"] == ACTION_CHOICE)
    assert isinstance(shares, dict)
    assert len(shares) == len({label[0] for label in shares}), "one token tells the actions apart"
    prompt = [token for section in prompt_sections(backend, *packet.texts) for token in section]
    matcher = GrammarCompiler(backend).matcher(packet.envelope, packet.snapshot.id)
    start = matcher.accept_forced()
    logp = looking(backend, [prompt, *([token] for token in start)])([])
    point = matcher.choice_point()
    plain = normalised({label: logp[token] for (label,), token in zip(point.labels, point.tokens, strict=True)})
    return Ours(packet, action, shares, plain)


def gap(found: Ours, instead: str) -> float:
    """Return by how much the native action was preferred to another, in log-probability."""
    return math.log(found.shares[found.action]) - math.log(found.shares[instead])


def differences(found: list[Ours], theirs: list[str], greedy: Callable[[DecisionPacket], str]) -> Iterator[str]:
    """Yield for each difference why: `noise`, `spelling`, or what cannot be explained."""
    noise = max(one.noise for one in found)
    for one, other in zip(found, theirs, strict=True):
        if one.action == other:
            continue
        if gap(one, other) < 2 * noise:
            yield "noise"
        elif greedy(one.packet) == other:
            yield "spelling"
        else:
            yield f"{one.action} became {other} against a preference of {gap(one, other):.3f} (noise {noise:.3f})"


def assert_same(ours: list[Ours], engine: Engine, backend: LlamaBackend, *, forced_as_usual: bool) -> None:
    theirs = [proposed(engine, one.packet)[0] for one in ours]
    engine.close()

    def greedy(packet: DecisionPacket) -> str:
        said = language(packet.envelope, packet.snapshot.id)
        sections = prompt_sections(backend, *packet.texts)
        return greedy_action(backend, sections, said, forced_as_usual=forced_as_usual)

    found = list(differences(ours, theirs, greedy))
    noise = max(one.noise for one in ours)
    tally = {action: [one.action for one in ours].count(action) for action in sorted({one.action for one in ours})}
    print(json.dumps({"packets": len(ours), "actions": tally, "differ": found, "noise": round(noise, 4)}))
    assert PACKETS == len(theirs)
    assert noise < NOISE_MAX
    assert {"noise", "spelling"} >= set(found)


@pytest.mark.timeout(7200)
def test_outlines_over_llama_cpp_decides_as_ours_does(ours: list[Ours], native: LlamaBackend, own_gguf: Path) -> None:
    writer = OutlinesWriter(drive(own_gguf, "llamacpp", threads=TINY_THREADS), "llguidance")
    assert_same(
        ours, TextEngine("outlines", writer, nonce=lambda: NONCE, now_ms=running_ms), native, forced_as_usual=True
    )


@pytest.mark.timeout(7200)
def test_a_real_llama_cpp_server_decides_as_ours_does(
    ours: list[Ours], native: LlamaBackend, own_gguf: Path, tmp_path: Path
) -> None:
    server = LlamaServer(own_gguf, tmp_path / "server.log")
    server.start()
    try:
        writer = RemoteWriter("llama-server", url=server.url, model="own")
        assert_same(
            ours, TextEngine("served", writer, nonce=lambda: NONCE, now_ms=running_ms), native, forced_as_usual=False
        )
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("share", "greedy", "expected"),
    [
        (0.501, "DENY", ["noise"]),
        (0.501, "PAY", ["noise"]),
        (0.600, "DENY", ["spelling"]),
        (0.600, "PAY", ["PAY became DENY against a preference of 0.405 (noise 0.010)"]),
    ],
)
def test_a_difference_that_neither_noise_nor_spelling_explains_is_found(
    share: float, greedy: str, expected: list[str], world: World
) -> None:
    world.tickets.put("T1")
    shares = {"PAY": share, "DENY": 1 - share}
    one = Ours(world.packet(), "PAY", shares, {label: part * math.exp(0.01) for label, part in shares.items()})
    assert expected == list(differences([one, one], ["PAY", "DENY"], lambda _packet: greedy))

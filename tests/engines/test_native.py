"""A local model as an engine: alone bit for bit the same, in company the same or nobody's decision."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.benchmarks.lib.packets import digits_packets
from sds.decoding.decoder import Mode
from sds.engines import native
from sds.engines.factory import open_engine, runtime_facts
from sds.engines.fallback import FallbackEngine, Link
from sds.engines.native import NativeEngine, check_slots
from sds.kernel.audit import verify
from sds.kernel.audit.stored_decision import read_decided
from sds.kernel.decision.packet import EVIDENCE, DecisionPacket
from sds.kernel.errors import ModelError, UsageError
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend
from tests.engines.conftest import decide, running_ms
from tests.kernel.durable import START_MS, World
from tests.llama_gguf import llama_gguf
from tests.model_fixtures import TINY_THREADS, refund_envelope
from tests.scale import scale, seeded

SLOTS, THREADS, TOKENS = 4, 16, 1024


def packets(world: World, count: int) -> list[DecisionPacket]:
    rng = seeded(5)
    first = world.kernel.preview(world.event("C1"))
    texts = (first.texts[0], first.texts[0].upper())
    words = first.texts[-1].split()
    return [
        replace(
            first,
            texts=(texts[n % 2], f"case {n}: {' '.join(rng.sample(words * 20, 1 + n % 20))}"),
            envelope=refund_envelope(),
            expires_at_ms=START_MS + 10**9,
        )
        for n in range(count)
    ]


def test_weights_that_give_no_numbers_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    """With one slot nothing is measured at the start that would show it, and each decision would escalate."""
    sound = llama_gguf(tmp_path / "sound.gguf")
    damaged = tmp_path / "damaged.gguf"
    raw = sound.read_bytes()
    damaged.write_bytes(raw[:-20_000] + b"\xff" * 20_000)
    open_engine(sound, now_ms=lambda: START_MS).close()
    with pytest.raises(ModelError, match="` returns numbers that are no logits") as refused:
        open_engine(damaged, now_ms=lambda: START_MS)
    assert "LOGITS_INVALID" == refused.value.reason_code


def test_what_recurs_is_a_section_of_its_own_behind_the_contracts_text(world: World, tiny: LlamaBackend) -> None:
    engine = NativeEngine(tiny, now_ms=lambda: START_MS)
    packet = world.kernel.preview(world.event("C1"))
    static, recurring, numbers, evidence = packet.texts
    other = replace(packet, texts=(static, recurring, "Decided before\n", f"more {numbers}", evidence))
    none = replace(packet, texts=(static, recurring, evidence))
    sections = [engine._sections(each, each.expires_at_ms) for each in (packet, other, none)]
    assert [3, 3, 3] == list(map(len, sections))
    assert sections[0][:2] == sections[1][:2]
    assert sections[0][0] == sections[2][0]
    assert recurring.encode() == b"".join(map(tiny.piece, sections[0][1]))
    # where nothing stands between it and the evidence, the word before that recurs, too
    assert f"{recurring}{EVIDENCE}".encode() == b"".join(map(tiny.piece, sections[2][1]))


def said(engine: NativeEngine, packet: DecisionPacket) -> bytes | str:
    try:
        data, _ = engine.propose(packet, tokens_max=TOKENS)
    except ModelError as error:
        return error.reason_code
    assert packet.envelope.contains(data)
    return data


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds", "exact"])
def test_sixteen_threads_decide_as_alone_or_not_at_all(
    world: World, opened: Callable[..., Backend], mode: Mode
) -> None:
    asked = packets(world, scale(16, 320))
    engine = NativeEngine(opened(slots=SLOTS, n_ctx=TOKENS), now_ms=running_ms, mode=mode)
    with closing(engine), ThreadPoolExecutor(THREADS) as pool:
        expected = [said(engine, packet) for packet in asked]
        found = list(pool.map(lambda packet: (said(engine, packet), engine.count_tokens("x y")), asked))
    differing = [now for before, (now, _) in zip(expected, found, strict=True) if before != now]
    assert {"CHOICE_TOO_CLOSE"} >= set(differing)
    assert len(differing) < len(asked) / 2
    assert {2} == {count for _, count in found}


@pytest.mark.parametrize("mode", ["greedy", "exact"])
def test_with_llama_cpp_company_does_not_show_in_the_last_digit_of_a_score(
    world: World, tiny_path: Callable[[int], Path], mode: Mode
) -> None:
    engine = open_engine(tiny_path(1), now_ms=running_ms, slots=SLOTS, mode=mode)

    def scored(packet: DecisionPacket) -> tuple[bytes, object, object]:
        data, decoding = engine.propose(packet, tokens_max=TOKENS)
        return data, decoding.confidence, decoding.alternatives

    asked = packets(world, scale(16, 320))
    with closing(engine), ThreadPoolExecutor(THREADS) as pool:
        expected = [scored(packet) for packet in asked]
        assert expected == list(pool.map(scored, asked))
        _, decoding = engine.propose(asked[0], tokens_max=TOKENS)
    assert 0.0 == decoding.facts["noise_logp_max"]


def test_a_choice_that_company_could_turn_is_a_humans(
    world: World, tiny_path: Callable[[int], Path], tiny: LlamaBackend
) -> None:
    backend = LlamaBackend(tiny_path(1), threads=TINY_THREADS, slots=2, n_ctx=TOKENS)
    shy = NativeEngine(backend, now_ms=running_ms, noise_logp_max=100.0)
    bold = NativeEngine(tiny, now_ms=running_ms)
    chain = FallbackEngine(
        [Link("shy", lambda: shy, 5_000, 300), Link("bold", lambda: bold, 5_000, 300)], now_ms=running_ms
    )
    with closing(shy):
        answers = [decide(world, shy, "C1"), decide(world, chain, "C2")]
    assert [("ESCALATED", "CHOICE_TOO_CLOSE")] * 2 == [(answer.state, answer.reason_code) for answer in answers]
    assert 0 == chain._links[0].failures


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -0.1])
def test_noise_that_would_guard_nothing_opens_no_engine(tiny: LlamaBackend, noise: float) -> None:
    with pytest.raises(ModelError, match="is not a log-probability"):
        NativeEngine(tiny, now_ms=running_ms, noise_logp_max=noise)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_ledger_keeps_what_a_replay_has_to_have_the_same(
    world: World, tiny_path: Callable[[int], Path], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tiny_path(1), now_ms=running_ms, slots=slots, mode="exact", noise_logp_max=0.0)
    with closing(engine):
        answer = decide(world, engine)
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'DECIDED' AND dfid = ?", answer.dfid)
    facts = json.loads(str(body))["decoding"]
    (passes,) = world.column("SELECT passes FROM policy_proposals WHERE dfid = ?", answer.dfid)
    assert passes == len(facts["rows"]) > 0
    assert 64 == len(facts["weights"])
    assert 64 == len(str(read_decided(world.store, answer.dfid).decoding.facts["prompt"]))  # sealed in the ledger
    assert ("exact", slots, 0.0, 1) == tuple(facts[name] for name in ("mode", "slots", "noise_logp_max", "threads"))
    assert facts["library"].startswith("llama-cpp-python 0.")
    assert () == verify.verify(world.store).faults


def test_a_prompt_that_is_too_long_disturbs_nobody(world: World, tiny_path: Callable[[int], Path]) -> None:
    engine = open_engine(tiny_path(1), now_ms=running_ms, slots=2, noise_logp_max=0.0)
    packet = packets(world, 1)[0]
    long = replace(packet, texts=(packet.texts[0], "very " * 4000))
    with closing(engine), ThreadPoolExecutor(2) as pool:
        other = pool.submit(said, engine, packet)
        assert "TOKEN_BUDGET_EXCEEDED" == said(engine, long)
        assert isinstance(other.result(), bytes)


def test_a_closed_engine_says_so(world: World, tiny_path: Callable[[int], Path]) -> None:
    engine = open_engine(tiny_path(1), now_ms=running_ms, slots=2, noise_logp_max=0.0)
    engine.close()
    engine.close()
    with pytest.raises(ModelError, match="closed"):
        engine.propose(packets(world, 1)[0], tokens_max=TOKENS)


@pytest.mark.parametrize(("slots", "mode", "most"), [(0, "greedy", 256), (257, "greedy", 256), (22, "exact", 21)])
def test_more_at_once_than_a_backend_can_is_refused(slots: int, mode: Mode, most: int) -> None:
    with pytest.raises(
        UsageError, match=f"the number of decisions at once must be 1 to {most} in mode {mode}, got {slots}"
    ):
        check_slots(slots, mode)


def test_what_runs_a_checkpoint_is_told_with_device_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"card of {device}")
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("one", "two"))
    facts = runtime_facts("transformers", device="cuda:0", dtype="bf16")
    assert ("cuda:0", "card of cuda:0", "bf16") == (facts["device"], facts["card"], facts["dtype"])
    assert str(facts["library"]).startswith("transformers 5.")
    assert "fp32" == runtime_facts("transformers")["dtype"]
    assert not {"dtype", "device", "card"} & runtime_facts("llamacpp").keys()
    for device, card in {"cuda": "one, two", "cuda:1": "two"}.items():
        facts = runtime_facts("llamacpp", device=device)
        assert (device, card) == (facts["device"], facts["card"])


def test_an_amount_that_the_prompt_shows_is_read_in_fewer_passes(
    own_vino: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = NativeEngine(own_vino, now_ms=running_ms, noise_logp_max=0.0)
    packets = [replace(packet, expires_at_ms=running_ms() + 10**9) for packet in digits_packets(tmp_path, scale(3, 60))]
    found = [engine.propose(packet, tokens_max=TOKENS) for packet in packets]
    monkeypatch.setattr(native, "numbers_shown", lambda _: ())
    plain = [engine.propose(packet, tokens_max=TOKENS) for packet in packets]
    assert [data for data, _ in plain] == [data for data, _ in found]
    assert sum(measured.passes for _, measured in plain) > sum(measured.passes for _, measured in found)

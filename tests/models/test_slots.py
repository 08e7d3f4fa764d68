"""What llama.cpp's one cache does with several prompts and their forks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter_ns

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Weights
from numpy.typing import NDArray

from sds.models.cache.prefix_cache import PrefixCache
from sds.models.llamacpp.backend import FORK_TOKENS_MAX, FRAGMENTED_CELLS_MIN, SHARED_PASS_TOKENS_MAX, LlamaBackend
from sds.models.llamacpp.context import TokenBatch
from sds.models.protocol import FORKS_MAX, SLOTS_MAX, BackendError, Row
from tests.hostile import TINY_VOCABULARY, Vocabulary, tiny_checkpoint
from tests.model_fixtures import TINY_THREADS
from tests.models.test_backends import sections_of
from tests.scale import scale, seeded

NOISE = 0.1  # of several slots against one: flash attention reckons in half precision; another prompt moves 10


@pytest.fixture
def four(single_path: Path) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(single_path, slots=4, n_ctx=512, threads=TINY_THREADS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def one(single_path: Path) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(single_path, n_ctx=512, threads=TINY_THREADS)
    yield backend
    backend.close()


def test_what_forks_of_a_fork_share_is_held_once(one: LlamaBackend):
    written, *ahead = sections_of(5, 300, *[20] * 12)
    one.prefill([])
    one.forward_one([1])
    source = one.fork(0)
    one.run([Row(source, written)])
    forks = [one.fork(source) for _ in ahead]
    found = one.run([Row(fork, tokens) for fork, tokens in zip(forks, ahead, strict=True)])
    assert len(ahead) == len(found)
    assert FORK_TOKENS_MAX < len(written) * len(ahead)
    room = FORK_TOKENS_MAX - len(written) - sum(map(len, ahead))
    with pytest.raises(BackendError, match=f"forks hold {FORK_TOKENS_MAX + 1} tokens of their own"):
        one.run(
            [
                Row(fork, tokens)
                for fork, tokens in zip(forks, sections_of(6, *_shares(room + 1, len(forks))), strict=True)
            ]
        )


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (n < total % parts) for n in range(parts)]


def passes_of(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the length of every pass from now on is added."""
    lengths: list[int] = []
    real = LlamaBackend._pass

    def counted(self: LlamaBackend, start: int, end: int) -> np.ndarray:
        lengths.append(end - start)
        return real(self, start, end)

    monkeypatch.setattr(LlamaBackend, "_pass", counted)
    return lengths


def test_random_work_in_four_slots_gives_what_one_slot_gives(four: LlamaBackend, one: LlamaBackend):
    """Prompts with beginnings in common come and go, ride together in every company, and fork."""
    rng = seeded(20)
    pieces = sections_of(rng.randrange(2**32), 40, 7, 30, 1, 12)
    held: list[list[list[int]]] = [[], [], [], []]
    for _ in range(scale(40, 1000)):
        for backend in (four, one):
            if backend.fragmented:
                backend.defragment()
        slots = rng.sample(range(4), rng.randint(1, 4))
        for slot in slots:
            if rng.random() < 0.5:
                held[slot] = [pieces[rng.randrange(5)] for _ in range(rng.randint(0, 4))]
            four.prefill(held[slot], slot=slot)
        rows = [Row(four.fork(slot) if rng.random() < 0.3 else slot, pieces[rng.randrange(5)]) for slot in slots]
        for slot, row, logits in zip(slots, rows, four.run(rows), strict=True):
            one.prefill(held[slot])
            assert np.allclose(one.forward_one(row.tokens), logits[0], rtol=0, atol=NOISE)


LONG = 300  # a prompt of `worked` that is longer is begun anew


@dataclass
class Read:
    """What a slot was given, in order, and what came of it."""

    before: list[list[int]]
    row: Row
    logits: NDArray[np.float32]


def worked(backend: LlamaBackend, rng: Random, passes: int) -> list[Read]:
    """Let prompts with beginnings in common come and go, ride in every company, and fork."""
    common = sections_of(rng.randrange(2**32), 90, 1, 30)
    held: dict[int, list[list[int]]] = {}
    read: list[Read] = []
    for _ in range(passes):
        rows, bases = [], []
        for slot in rng.sample(range(backend.slots), rng.randint(1, backend.slots)):
            if slot not in held or sum(map(len, held[slot])) > LONG or rng.random() < 0.3:
                held[slot] = common[: rng.randint(0, 3)]
                backend.prefill(held[slot], slot=slot)
            (tokens,) = sections_of(rng.randrange(2**32), rng.choice([1, 1, 2, 12, 40, 90]))
            at = backend.fork(slot) if rng.random() < 0.3 else slot
            rows.append(Row(at, tokens, rng.choice([0, 1, 1, len(tokens)])))
            bases.append(slot)
        for row, base, logits in zip(rows, bases, backend.run(rows), strict=True):
            read.append(Read(held[base], row, logits))
            if row.slot == base:
                held[base] = [*held[base], list(row.tokens)]
            elif rng.random() < 0.5:
                backend.drop(row.slot)
        if backend.fragmented or rng.random() < 0.02:
            backend.defragment()
            held.clear()
    return read


@pytest.mark.parametrize("weights", [Weights.F32, Weights.F16, Weights.BF16, Weights.Q8_0, Weights.Q4_1])
def test_in_any_company_a_row_gives_the_bits_it_gives_alone(weights: Weights, vocabulary: Vocabulary, tmp_path: Path):
    backend = LlamaBackend(
        tiny_checkpoint(tmp_path / "tiny.gguf", vocabulary, 1, weights=weights),
        slots=5,
        n_ctx=512,
        threads=TINY_THREADS,
    )
    rng = seeded(28)
    read = worked(backend, rng, scale(60, 2000))
    for one in rng.sample(read, scale(25, 200)):
        backend.defragment()
        backend.prefill([])
        for tokens in one.before:
            backend.run([Row(0, tokens, 0)])
        assert np.array_equal(backend.run([Row(0, one.row.tokens, one.row.outputs)])[0], one.logits)
    backend.close()


def test_a_pass_of_several_slots_is_short_and_never_of_one_token(four: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    passes = passes_of(four, monkeypatch)
    four.prefill([[20], [21] * 64])
    assert [(1, TINY_VOCABULARY)] == [four.run([Row(0, [22])])[0].shape]
    four.run([Row(0, [23] * (2 * SHARED_PASS_TOKENS_MAX + 1), 0)])
    assert [2, 32, 32, 2, 43, 43, 41] == passes


def test_a_rest_keeps_the_sections_that_lie_lowest_and_no_others(four: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    four._prefix_cache = PrefixCache(0)
    first, second, third = sections_of(29, 50, 40, 30)
    four.prefill([first, second], slot=1)
    four.forward_one([20, 21], slot=1)
    four.prefill([first, third], slot=2)
    four.fork(2)
    four.defragment()
    passes = passes_of(four, monkeypatch)
    four.prefill([first, second], slot=0)
    assert [] == passes
    four.prefill([first, third], slot=3)
    assert [30] == passes
    for slot in range(4):
        four.prefill([third], slot=slot)
    four.defragment()  # what lay lowest is gone
    four.prefill([third], slot=0)
    assert [30, 30, 30] == passes


def test_a_cache_that_never_rests_fails_once_and_forgets(four: LlamaBackend):
    def wear_out() -> None:
        for n in range(100):
            assert four.fragmented == (n * 400 >= FRAGMENTED_CELLS_MIN - 100)
            four.prefill([[21] * 400], slot=1)
            four.prefill([], slot=1)

    four.prefill([[20] * 100], slot=0)
    with pytest.raises(BackendError) as caught:
        wear_out()
    assert "the cache is fragmented" == str(caught.value)
    assert "call `defragment` between two decisions" == caught.value.hint
    assert not four.fragmented
    assert (512, TINY_VOCABULARY) == four.run([Row(0, [20] * 512, 512)])[0].shape


def test_one_prompt_after_the_other_needs_nobody_to_call_for_a_rest(four: LlamaBackend):
    common, own = sections_of(30, 100, 300)
    expected = None
    for _ in range(30):
        four.prefill([common])
        logits = four.forward_one(own)
        expected = logits if expected is None else expected
        assert np.array_equal(expected, logits)


def test_a_prompt_whose_rest_fails_is_read_from_its_beginning(four: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    common, own = sections_of(30, 100, 300)
    four.prefill([common])
    expected = four.forward_one(own)
    while not four.fragmented:
        four.prefill([common])
        four.forward_one(own)

    def failing(_: int) -> None:
        raise BackendError("no cell could be moved")

    monkeypatch.setattr(four._kv_cache, "defragment", failing)
    four.prefill([common])
    assert np.array_equal(expected, four.forward_one(own))


def test_what_another_slot_holds_is_shared_and_not_decoded_again(four: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    common, own, other = sections_of(21, 100, 12, 9)
    four.prefill([common, own], slot=2)
    passes = passes_of(four, monkeypatch)
    four.prefill([common, other], slot=0)
    assert [9] == passes
    four.prefill([], slot=2)
    four.prefill([common, own], slot=3)
    assert [9] == passes  # no slot holds it, but it is kept


def test_shared_cells_stay_when_the_slot_they_came_from_moves_on(four: LlamaBackend, one: LlamaBackend):
    common, own, other = sections_of(22, 100, 12, 9)
    four.prefill([common, own], slot=0)
    four.prefill([common], slot=1)
    four.prefill([other, other], slot=0)
    one.prefill([common])
    assert np.allclose(one.forward_one(own), four.forward_one(own, slot=1), rtol=0, atol=NOISE)


def test_with_one_slot_the_first_fork_of_a_pass_is_bit_equal_to_it_alone(one: LlamaBackend):
    """Its cells are its positions; those of the others lie behind, which shows in the last digits."""
    common, *tails = sections_of(23, 100, 12, 9, 2, 7)
    alone = []
    for tail in tails:
        one.prefill([common])
        alone.append(one.run([Row(0, tail, len(tail))])[0])
    one.prefill([common])
    together = one.run([Row(one.fork(0), tail, len(tail)) for tail in tails])
    assert np.array_equal(alone[0], together[0])
    for expected, found in zip(alone, together, strict=True):
        assert np.allclose(expected, found, rtol=0, atol=1e-3)


def test_more_rows_than_a_pass_holds_are_cut_in_order_and_evenly(
    single_path: Path, one: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    backend = LlamaBackend(single_path, slots=3, n_ctx=512, threads=TINY_THREADS)
    rows = [Row(slot, tokens, 5) for slot, tokens in enumerate(sections_of(24, 50, 100, 7))]
    passes = passes_of(backend, monkeypatch)
    found = backend.run(rows)
    assert [53, 53, 51] == passes
    for row, logits in zip(rows, found, strict=True):
        one.prefill([])
        assert np.allclose(one.run([replace(row, slot=0)])[0], logits, rtol=0, atol=NOISE)
    backend.close()


def test_a_pass_without_outputs_gives_none(four: LlamaBackend):
    assert [(0, TINY_VOCABULARY)] * 2 == [each.shape for each in four.run([Row(0, [20], 0), Row(3, [21, 22], 0)])]


def test_a_failed_pass_forgets_every_slot_and_every_fork(four: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    four._prefix_cache = PrefixCache(0)
    common, own = sections_of(25, 30, 12)
    for slot in range(4):
        four.prefill([common, own], slot=slot)
    fork = four.fork(2)
    expected = four.forward_one([20, 21], slot=1)
    monkeypatch.setattr("llama_cpp.llama_decode", lambda *_: -3)
    with pytest.raises(BackendError) as caught:
        four.forward_one([20, 21], slot=0)
    assert "the model could not be run on 2 tokens (llama.cpp code -3)" == str(caught.value)
    monkeypatch.undo()
    passes = passes_of(four, monkeypatch)
    four.drop(fork)
    with pytest.raises(BackendError, match=f"there is no slot {fork}"):
        four.forward_one([20], slot=fork)
    four.prefill([common, own], slot=1)
    assert [30, 12] == passes
    assert np.allclose(expected, four.forward_one([20, 21], slot=1), rtol=0, atol=NOISE)


def test_forks_hold_a_bounded_number_of_tokens_of_their_own(one: LlamaBackend):
    one.prefill([[20] * 12])
    forks = [one.fork(0) for _ in range(5)]
    room = FORK_TOKENS_MAX // 5
    one.run([Row(fork, [21] * room) for fork in forks])
    with pytest.raises(BackendError) as caught:
        one.run([Row(fork, [22]) for fork in forks])
    assert f"forks hold {5 * room + 5} tokens of their own, which is more than {FORK_TOKENS_MAX}" == str(caught.value)
    one.drop(forks[0])
    one.run([Row(fork, [22]) for fork in forks[1:]])
    one.prefill([])


def test_all_slots_and_all_forks_can_be_full_at_once(single_path: Path):
    """The cache has room for what the limits permit: no pass is refused for lack of it."""
    backend = LlamaBackend(single_path, slots=SLOTS_MAX, n_ctx=64, threads=TINY_THREADS)
    own = FORK_TOKENS_MAX // FORKS_MAX
    for slot in range(SLOTS_MAX):
        backend.prefill([[20 + slot] * (64 - own)], slot=slot)
    forks = [backend.fork(slot) for slot in range(FORKS_MAX)]
    backend.run([Row(fork, [21] * own, 0) for fork in forks])
    found = backend.run([Row(slot, [22] * own) for slot in range(SLOTS_MAX)])
    assert SLOTS_MAX == len(found)
    assert all(np.isfinite(logits).all() for logits in found)
    backend.close()


def test_a_cache_beyond_the_limit_is_refused_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(BackendError) as caught:
        LlamaBackend(tmp_path / "none.gguf", slots=64, n_ctx=4096)
    assert "64 slots of 4096 tokens need a cache of more than 131072 tokens" == str(caught.value)
    assert "ask for fewer slots or a smaller context" == caught.value.hint


def test_filling_a_batch_costs_microseconds():
    batch, tokens = TokenBatch(4096), list(range(100))
    took_us = []
    for _ in range(50):
        start = perf_counter_ns()
        batch.clear()
        batch.add(tokens, position=200, sequence=3, outputs=1)
        filled = batch.part(0, 100)
        took_us.append((perf_counter_ns() - start) / 1000)
    assert 100 == filled.n_tokens
    assert [(0, 200, 3, 0), (99, 299, 3, 1)] == [
        (filled.token[i], filled.pos[i], filled.seq_id[i][0], filled.logits[i]) for i in (0, 99)
    ]
    assert min(took_us) < 50

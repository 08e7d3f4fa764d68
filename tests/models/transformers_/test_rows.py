"""Several prompts in one transformers model: rows of one call, forks, and models that take one row."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import CARD_SLOTS_MAX, SLOTS_MAX, BackendError, Row
from sds.models.transformers_.backend import HfBackend
from sds.models.transformers_.fused import fuse, fused_norm
from sds.models.transformers_.kv_cache import DynamicKVCaches, TensorKVCache, captured
from tests.model_fixtures import TINY_THREADS
from tests.models.conftest import SLOTS, edit
from tests.models.test_backends import sections_of
from tests.scale import scale, seeded

TOLERANCE = 1e-4
DYNAMIC_ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}


def plain(backend: HfBackend, tokens: list[int], **options: Any) -> Any:
    """Run the tokens through the model at once, without any cache."""
    with torch.inference_mode():
        return backend.module(input_ids=torch.tensor([tokens]), use_cache=False, **options)


def plain_logits(backend: HfBackend, tokens: list[int]) -> np.ndarray:
    return np.asarray(plain(backend, tokens).logits[0].numpy())


def close(expected: np.ndarray, found: np.ndarray) -> bool:
    return expected.shape == found.shape and bool(np.abs(expected - found).max(initial=0) <= TOLERANCE)


def calls_of(backend: HfBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list to which every call of the model adds the shape of its tokens, [rows, longest]."""
    shapes: list[tuple[int, ...]] = []
    run = backend.module.model.forward

    def noting(*args: Any, **inputs: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return run(*args, **inputs)

    monkeypatch.setattr(backend.module.model, "forward", noting)
    return shapes


def test_a_model_of_full_attention_takes_cells_and_one_with_windows_does_not(several: HfBackend, own_caches: HfBackend):
    assert (TensorKVCache, DynamicKVCaches) == (type(several._kv_cache), type(own_caches._kv_cache))


def test_a_model_that_turns_by_its_longest_row_runs_one_row_at_a_time(
    tiny_folder: Callable[[int], Path], tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_folder(1), tmp_path / "checkpoint"))
    edit(folder, **DYNAMIC_ROPE)
    backend = HfBackend(folder, threads=TINY_THREADS)
    assert DynamicKVCaches is type(backend._kv_cache)
    backend.close()


def test_a_model_that_ignores_where_its_tokens_stand_takes_no_cells(
    tiny_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    """Found by trying it out, not by a list of names."""
    from transformers.models.llama.modeling_llama import LlamaModel

    sound = LlamaModel.forward

    def ignoring(self: Any, *args: Any, **inputs: Any) -> Any:
        return sound(self, *args, **{**inputs, "attention_mask": None, "position_ids": None})

    monkeypatch.setattr(LlamaModel, "forward", ignoring)
    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS)
    assert DynamicKVCaches is type(backend._kv_cache)
    backend.close()


def test_rows_of_one_pass_are_what_each_is_alone_without_a_cache(either: HfBackend):
    """Random prompts, random rows, several passes: every output, not the last alone."""
    rng = seeded(11)
    for _ in range(scale(6, 100)):
        lengths = [rng.randint(1, 30) for _ in range(SLOTS)]
        texts = sections_of(rng.randrange(2**32), *lengths)
        for slot, text in enumerate(texts):
            either.prefill([text], slot=slot)
        for _ in range(3):
            slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
            rows = [_random_row(rng, slot) for slot in slots]
            found = either.run(rows)
            for row, logits in zip(rows, found, strict=True):
                texts[row.slot] = texts[row.slot] + list(row.tokens)
                expected = plain_logits(either, texts[row.slot])
                assert close(expected[len(expected) - row.outputs :], logits)


def _random_row(rng: Any, slot: int) -> Row:
    (tokens,) = sections_of(rng.randrange(2**32), rng.randint(1, 9))
    return Row(slot, tokens, rng.randint(0, len(tokens)))


def test_rows_of_like_length_share_a_call_and_rows_of_unlike_length_do_not(
    several: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    long, *short = sections_of(5, 300, 3, 3, 1)
    for slot in range(SLOTS):
        several.prefill([], slot=slot)
    shapes = calls_of(several, monkeypatch)
    several.run([Row(slot, tokens) for slot, tokens in enumerate([long, *short])])
    assert [(3, 3), (1, 300)] == shapes


def test_a_model_with_windows_runs_one_row_a_call(own_caches: HfBackend, monkeypatch: pytest.MonkeyPatch):
    shapes = calls_of(own_caches, monkeypatch)
    own_caches.run([Row(slot, [20 + slot]) for slot in range(SLOTS)])
    assert [(1, 1)] * SLOTS == shapes


def test_rows_longer_than_a_pass_are_cut_and_all_their_outputs_come_back(several: HfBackend):
    first, second = sections_of(7, 700, 520)
    for slot in (0, 1):
        several.prefill([], slot=slot)
    found = several.run([Row(0, first, 650), Row(1, second, 2)])
    assert close(plain_logits(several, first)[-650:], found[0])
    assert close(plain_logits(several, second)[-2:], found[1])
    assert (several.vocab_size,) == several.forward_one(first[:600], slot=1).shape


def test_the_head_runs_only_where_logits_are_wanted(several: HfBackend, monkeypatch: pytest.MonkeyPatch):
    heads: list[tuple[int, ...]] = []
    head = several.module.lm_head
    run = head.forward
    monkeypatch.setattr(head, "forward", lambda states: heads.append(tuple(states.shape[:2])) or run(states))
    several.prefill(sections_of(8, 30, 12), slot=0)
    several.prefill([], slot=1)
    assert [] == heads
    several.run([Row(0, [20, 21, 22], 2), Row(1, [23], 1)])
    assert [(2, 2)] == heads


def test_a_slot_never_sees_another_ones_prompt(either: HfBackend):
    """What a slot gives is bit-equal whatever its neighbours hold, as long as it runs alone."""
    first, second, other = sections_of(9, 40, 12, 25)
    for slot in range(SLOTS):
        either.prefill([], slot=slot)
    either.prefill([first, second], slot=1)
    expected = either.forward_one([20, 21], slot=1)
    for slot in (0, 2, 3):
        either.prefill([other, second], slot=slot)
        either.forward_one([22], slot=slot)
    either.prefill([first, second], slot=1)
    assert np.array_equal(expected, either.forward_one([20, 21], slot=1))


def test_a_row_beside_what_is_no_number_is_not_touched_by_it(several: HfBackend):
    """An overflow leaves NaN in the cells; a later, shorter prompt in its place may not read them."""
    long, short = sections_of(10, 40, 4)
    several.prefill([short], slot=1)
    (expected,) = several.run([Row(1, [20, 21])])
    several.prefill([long], slot=0)
    with torch.inference_mode():
        for stored in several._kv_cache._stored():  # type: ignore[union-attr]
            stored[1] = torch.nan
    several.prefill([], slot=1)
    several.prefill([short], slot=1)
    _, found = several.run([Row(0, [22]), Row(1, [20, 21])])
    assert close(expected, found)


def test_a_section_that_another_slot_holds_is_copied_not_read_again(
    several: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    contract, case = sections_of(12, 50, 7)
    several.prefill([contract, case], slot=0)
    expected = several.forward_one([20], slot=0)
    several.prefill([], slot=2)
    shapes = calls_of(several, monkeypatch)
    several.prefill([contract, case[:3]], slot=2)
    assert [(1, 3)] == shapes
    several.prefill([contract, case], slot=2)
    assert np.array_equal(expected, several.forward_one([20], slot=2))


def test_forks_go_their_own_ways_and_leave_their_prompt_alone(either: HfBackend):
    text, *endings = sections_of(13, 30, 2, 5, 3)
    either.prefill([text])
    forks = [either.fork(0) for _ in endings]
    found = either.run([Row(fork, ending, len(ending)) for fork, ending in zip(forks, endings, strict=True)])
    for ending, logits in zip(endings, found, strict=True):
        assert close(plain_logits(either, text + ending)[-len(ending) :], logits)
    child = either.fork(forks[0])
    assert close(plain_logits(either, [*text, *endings[0], 20])[-1], either.forward_one([20], slot=child))
    assert close(plain_logits(either, [*text, 21])[-1], either.forward_one([21]))
    for fork in [*forks, child]:
        either.drop(fork)


def test_a_failed_pass_forgets_its_own_prompts_and_no_others(either: HfBackend, monkeypatch: pytest.MonkeyPatch):
    first, second = sections_of(16, 20, 8)
    for slot in range(3):
        either.prefill([first, second], slot=slot)
    expected = either.forward_one([20, 21], slot=0)
    either.prefill([first, second], slot=0)
    fork = either.fork(1)
    shapes = calls_of(either, monkeypatch)
    with monkeypatch.context() as broken:
        broken.setattr(either.module.model.layers[1].mlp, "forward", out_of_memory)
        with pytest.raises(BackendError, match="could not be run on 3 tokens: no memory"):
            either.run([Row(0, [20, 21]), Row(fork, [22])])
    either.drop(fork)
    shapes.clear()
    assert np.array_equal(expected, either.forward_one([20, 21], slot=2))
    assert [(1, 2)] == shapes
    either.prefill([first, second], slot=0)
    assert np.array_equal(expected, either.forward_one([20, 21], slot=0))


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_forks_for_which_there_was_no_memory_find_it_when_there_is(
    tiny_folder: Callable[[int], Path], nth: int, monkeypatch: pytest.MonkeyPatch
):
    """Wherever among the layers it ran out."""
    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS)
    backend.prefill([[20, 21, 22]])
    expected = backend.forward_one([23])
    moved, calls = TensorKVCache._moved, 0

    def scarce(cells: TensorKVCache, stored: torch.Tensor, seats: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return moved(cells, stored, seats)

    backend.prefill([[20, 21, 22]])
    with monkeypatch.context() as scarcity:
        scarcity.setattr(TensorKVCache, "_moved", scarce)
        with pytest.raises(BackendError, match="no memory"):
            backend.run([Row(backend.fork(0), [23])])
    backend.prefill([[20, 21, 22]])
    (found,) = backend.run([Row(backend.fork(0), [23])])
    assert np.array_equal(expected, found[0])
    backend.close()


def out_of_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("rows", "tokens", "outputs", "shape"),
    [
        (1, 1, 1, (1, 1)),
        (2, 1, 1, (2, 1)),
        (3, 1, 1, (4, 1)),
        (4, 5, 5, (4, 8)),
        (3, 9, 0, (4, 32)),
        (1, 40, 3, (1, 64)),
    ],
)
def test_passes_of_fixed_shape_give_what_passes_of_their_own_shape_give(
    rows: int, tokens: int, outputs: int, shape: tuple[int, int], several: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    """The shapes that are captured on CUDA, here uncaptured: everything is rounded up, and padding touches nothing."""
    texts = sections_of(21, 30, 4, 17, 9)
    new = sections_of(24, *[tokens] * rows)
    shapes = calls_of(several, monkeypatch)

    def stepped(steps: int) -> list[np.ndarray]:
        for slot, text in enumerate(texts):
            several.prefill([text], slot=slot)
        shapes.clear()
        asked = [Row(slot, tokens, outputs) for slot, tokens in enumerate(new)]
        return [logits for _ in range(steps) for logits in several.run(asked)]

    expected = stepped(3)
    monkeypatch.setattr(several._kv_cache, "static", True)
    found = stepped(3)
    assert all(close(one, two) for one, two in zip(expected, found, strict=True))
    assert [shape] * 3 == shapes
    held = texts[3] + (new[3] * 3 if rows == SLOTS else [])
    assert close(plain_logits(several, [*held, 25])[-1], several.forward_one([25], slot=3))


def test_a_pass_that_computes_much_keeps_its_own_shape(several: HfBackend, monkeypatch: pytest.MonkeyPatch):
    """Rounded up it would compute more than starting its kernels costs."""
    for slot in range(SLOTS):
        several.prefill([], slot=slot)
    monkeypatch.setattr(several._kv_cache, "static", True)
    shapes = calls_of(several, monkeypatch)
    several.run([Row(slot, tokens) for slot, tokens in enumerate(sections_of(25, 130, 130, 130))])
    assert [(3, 130)] == shapes


def test_fused_layers_give_what_the_models_own_give(tiny_folder: Callable[[int], Path]):
    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS)
    (text,) = sections_of(26, 40)
    expected = plain_logits(backend, text)
    fuse(backend.module)
    norms = [module for module in backend.module.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    assert all("forward" in vars(norm) for norm in norms)
    assert close(expected, plain_logits(backend, text))
    backend.close()


def test_a_norm_of_another_making_is_not_fused():
    """As one that multiplies by one more than its weight: tried out, not known by its name."""
    norm = torch.nn.RMSNorm(8)
    norm.variance_epsilon = 1e-6  # type: ignore[assignment]
    norm.forward = lambda hidden: torch.nn.functional.rms_norm(hidden, (8,), 1 + norm.weight, 1e-6)  # type: ignore[method-assign]
    assert fused_norm(norm) is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_takes_cells_and_rows_stay_close_to_what_they_are_alone(
    dtype: str, tiny_folder: Callable[[int], Path]
):
    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS, dtype=dtype, slots=2)  # type: ignore[arg-type]
    assert TensorKVCache is type(backend._kv_cache)
    texts = sections_of(22, 20, 5)
    for slot, text in enumerate(texts):
        backend.prefill([text], slot=slot)
    for text, found in zip(texts, backend.run([Row(0, [20, 21]), Row(1, [22])]), strict=True):
        expected = plain(backend, text + ([20, 21] if len(text) == 20 else [22])).logits[0, -1].float().numpy()
        assert np.float32 == found.dtype
        assert 0.1 > np.abs(expected - found[0]).max() / expected.std()
    backend.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_passes_on_cuda_give_what_uncaptured_ones_give(
    tiny_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    backend = HfBackend(tiny_folder(1), device="cuda", threads=TINY_THREADS, slots=SLOTS)
    texts = sections_of(23, 30, 4, 17, 9)

    def stepped() -> list[np.ndarray]:
        for slot, text in enumerate(texts):
            backend.prefill([text], slot=slot)
        return [logits for n in range(3) for logits in backend.run([Row(slot, [20 + n]) for slot in range(3)])]

    captured = stepped() + stepped()
    assert backend._kv_cache._graphs  # type: ignore[union-attr]
    backend.drop(backend.fork(0))  # room for forks: all is captured anew
    captured += stepped()
    assert backend._kv_cache._graphs  # type: ignore[union-attr]
    monkeypatch.setattr(backend._kv_cache, "static", False)
    assert all(close(one, two) for one, two in zip(stepped() * 3, captured, strict=True))
    backend.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that cannot capture")
def test_a_pass_that_cannot_be_captured_runs_as_it_is_and_that_is_said():
    with pytest.warns(UserWarning, match="much slower, because they cannot be captured in a CUDA graph: "):
        compute = captured(lambda *inputs: inputs[0] + 1, [torch.zeros(1)] * 3, torch.device("cuda"), None)
    assert [8.0] == compute(*[torch.tensor([7.0])] * 3).tolist()


def test_as_many_rows_as_a_card_takes_give_what_each_gives_alone(tiny_folder: Callable[[int], Path]) -> None:
    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS, n_ctx=8, slots=CARD_SLOTS_MAX)
    for slot in range(CARD_SLOTS_MAX):
        backend.prefill([[1, 2 + slot % 7]], slot=slot)
    found = backend.run([Row(slot, [3 + slot % 5]) for slot in range(CARD_SLOTS_MAX)])
    assert CARD_SLOTS_MAX == len(found)
    for slot in (0, 1, 34, CARD_SLOTS_MAX - 1):
        assert close(plain_logits(backend, [1, 2 + slot % 7, 3 + slot % 5])[-1:], found[slot])
    backend.close()


def test_llama_cpp_has_fewer_slots(tiny_path: Callable[[int], Path]) -> None:
    with pytest.raises(BackendError, match="slots must be 1 to 64, got 65"):
        LlamaBackend(tiny_path(1), threads=TINY_THREADS, slots=SLOTS_MAX + 1)

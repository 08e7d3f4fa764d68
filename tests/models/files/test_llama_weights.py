"""What is refused of a GGUF that is run layer by layer: each in one line, before it could run another model than it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.files.llama_weights import LlamaWeights
from sds.models.protocol import BackendError
from tests.llama_gguf import Sizes, Tensors, llama_gguf, random_tensors
from tests.scale import scale, seeded

OTHER = "this model does not run in ours here: "
SILENT = "`{path}` does not describe its model"


def read(path: Path) -> None:
    """Read all of a file, as a backend does."""
    weights = LlamaWeights(path, "ours")
    weights.rope_tables(1)
    for name in random_tensors():
        assert weights[name].size


def refused(path: Path) -> BackendError:
    with pytest.raises(BackendError) as caught:
        read(path)
    assert "\n" not in str(caught.value) + caught.value.hint
    return caught.value


def without(name: str) -> Tensors:
    return {kept: values for kept, values in random_tensors().items() if kept != name}


def spoiled(name: str, value: float) -> Tensors:
    tensors = random_tensors()
    tensors[name].flat[3] = value
    return tensors


def shorter(name: str, rows: int) -> Tensors:
    tensors = random_tensors()
    return tensors | {name: tensors[name][:rows]}


def more(name: str, values: np.ndarray) -> Tensors:
    return random_tensors() | {name: values.astype(np.float32)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("blk.1.ffn_up.weight"), f"{OTHER}it has no tensor `blk.1.ffn_up.weight`"),
        (without("token_embd.weight"), f"{OTHER}it has no tensor `token_embd.weight`"),
        ({}, f"{OTHER}it has no tensor `blk.0.attn_k.weight`"),
        (more("blk.0.attn_q.bias", np.zeros(32)), f"{OTHER}it has the unknown tensor `blk.0.attn_q.bias`"),
        (more("blk.2.attn_q.weight", np.ones((32, 32))), f"{OTHER}it has the unknown tensor `blk.2.attn_q.weight`"),
        (shorter("blk.1.ffn_up.weight", 63), f"{OTHER}the shape of `blk.1.ffn_up.weight` differs from its settings"),
        (
            shorter("blk.1.ffn_norm.weight", 1),
            f"{OTHER}the shape of `blk.1.ffn_norm.weight` differs from its settings",
        ),
        (shorter("token_embd.weight", 99), f"{OTHER}the shape of `token_embd.weight` differs from its settings"),
        (
            more("rope_freqs.weight", np.ones(16)),
            f"{OTHER}the shape of `rope_freqs.weight` differs from its settings",
        ),
        (
            more("rope_freqs.weight", np.zeros(8)),
            "the weights `rope_freqs.weight` contain a zero, but they are divisors",
        ),
        (
            spoiled("blk.1.ffn_up.weight", np.nan),
            "the weights `blk.1.ffn_up.weight` contain values that are too large or not numbers",
        ),
        (
            spoiled("blk.0.attn_q.weight", np.inf),
            "the weights `blk.0.attn_q.weight` contain values that are too large or not numbers",
        ),
        (
            spoiled("token_embd.weight", -np.inf),
            "the weights `token_embd.weight` contain values that are too large or not numbers",
        ),
        (
            spoiled("output_norm.weight", np.nan),
            "the weights `output_norm.weight` contain values that are too large or not numbers",
        ),
        (
            spoiled("blk.0.ffn_up.weight", 3.4e38),
            "the weights `blk.0.ffn_up.weight` contain values that are too large or not numbers",
        ),
    ],
)
def test_a_file_with_other_tensors_than_a_model_of_its_settings_has(tensors: Tensors, message: str, tmp_path: Path):
    assert message == str(refused(llama_gguf(tmp_path / "model.gguf", tensors=tensors)))


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {"rope.scaling.factor": 2.0},
            f"{OTHER}its setting `llama.rope.scaling.factor` is not known",
            "choose llamacpp",
        ),
        (
            {"rope.dimension_count": 8},
            f"{OTHER}its heads are rotated only in part, or its keys and values differ in size",
            "choose llamacpp",
        ),
        ({"attention.head_count_kv": [1, 1]}, SILENT, "its setting `llama.attention.head_count_kv` is no number"),
        ({"block_count": "two"}, SILENT, "its setting `llama.block_count` is no number"),
        ({"block_count": float("inf")}, SILENT, "its setting `llama.block_count` is no number"),
        ({"rope.freq_base": float("nan")}, SILENT, "its `rope.freq_base` or the epsilon of its norms is out of range"),
        ({"attention.head_count": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.head_count_kv": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.key_length": 0}, SILENT, "one of its sizes is not positive"),
        ({"context_length": 0}, SILENT, "one of its sizes is not positive"),
        ({"block_count": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.head_count": 3, "attention.head_count_kv": 2}, SILENT, "heads cannot be shared evenly or halved"),
        ({"block_count": 10**9}, f"{OTHER}it has no tensor `blk.10.attn_k.weight`", "choose llamacpp"),
        (
            {"embedding_length": 10**12},
            f"{OTHER}the shape of `blk.0.attn_k.weight` differs from its settings",
            "choose llamacpp",
        ),
        (
            {"feed_forward_length": 10**12},
            f"{OTHER}the shape of `blk.0.ffn_down.weight` differs from its settings",
            "choose llamacpp",
        ),
    ],
)
def test_a_file_whose_settings_are_unknown_or_absurd(settings: dict[str, Any], message: str, hint: str, tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", settings=settings)
    error = refused(path)
    assert (message.format(path=path), hint) == (str(error), error.hint)


@pytest.mark.parametrize("name", ["block_count", "context_length", "attention.layer_norm_rms_epsilon"])
def test_a_file_that_lacks_a_setting(name: str, tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", without=name)
    error = refused(path)
    assert SILENT.format(path=path) == str(error)
    assert f"its setting `llama.{name}` is missing" == error.hint


def test_another_architecture(tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2", 1))
    error = refused(path)
    assert "only GGUF files of the architecture `llama` run in ours, not of `qwen2`" == str(error)


@pytest.mark.parametrize("kept", [4, 20, 1000, 60_000])
def test_a_file_that_is_cut_off(kept: int, tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BackendError, match="is damaged, or its kind of GGUF is not supported"):
        LlamaWeights(path, "ours")


def test_a_file_damaged_anywhere_before_its_weights_is_a_model_or_refused(tmp_path: Path):
    """llama.cpp looks at it first; nothing here relies on that."""
    rng = seeded(31)
    path = llama_gguf(tmp_path / "model.gguf", Sizes(layers=1))
    sound = path.read_bytes()
    end = len(sound) - sum(values.nbytes for values in random_tensors(Sizes(layers=1)).values())
    tensors_at = sound.index(b"token_embd.weight")
    found = {True: 0, False: 0}
    for n in range(scale(300, 20_000)):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(end) if n % 2 else rng.randrange(tensors_at, end)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            weights = LlamaWeights(path, "ours")
            words = weights["token_embd.weight"]
        except BackendError:
            found[False] += 1
        else:
            assert weights.shape.vocab_size == len(words)
            found[True] += 1
    assert min(found.values()) > 10

"""Weights in the file that the model of its config has not: dropped, they would leave another model of the same name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.protocol import BackendError
from sds.models.transformers_.backend import HfBackend
from tests.llama_gguf import llama_gguf, random_tensors
from tests.model_fixtures import TINY_THREADS
from tests.models.transformers_.test_backend import edit, edit_weights, opened, refused

SURPLUS = "the checkpoint has {} weights that its config does not name, first `{}`"


@pytest.fixture
def folder(tiny_folder: Callable[[int], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(1), tmp_path / "checkpoint"))


def add_biases(weights: dict[str, Any]) -> None:
    for name in [name for name in weights if "self_attn" in name]:
        weights[name.replace("weight", "bias")] = np.ones(len(weights[name]), np.float16)


def test_biases_that_the_config_does_not_name_are_refused(folder: Path):
    edit_weights(folder, add_biases)
    assert SURPLUS.format(8, "model.layers.0.self_attn.k_proj.bias") == str(refused(folder))
    edit(folder / "config.json", attention_bias=True)
    opened(folder).close()


def test_a_layer_more_than_the_config_names_is_refused(folder: Path):
    edit(folder / "config.json", num_hidden_layers=1)
    assert SURPLUS.format(9, "model.layers.1.input_layernorm.weight") == str(refused(folder))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_what_is_computed_or_tied_may_be_stored(name: str, folder: Path):
    def store(weights: dict[str, Any]) -> None:
        tied = weights["model.embed_tokens.weight"]
        weights[name] = tied.copy() if name == "lm_head.weight" else np.ones(16, np.float32)

    edit_weights(folder, store)
    backend = opened(folder)
    assert backend.vocab_size == backend.forward_one([20]).size
    backend.close()


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_gguf_of_more_than_transformers_reads_of_it_is_refused(name: str, tmp_path: Path):
    path = llama_gguf(tmp_path / "more.gguf", tensors=random_tensors() | {name: np.ones(32, np.float32)})
    with pytest.raises(BackendError) as caught:
        HfBackend(path, threads=TINY_THREADS)
    assert SURPLUS.format(1, name) == str(caught.value)


def test_a_gguf_of_fewer_layers_than_it_holds_is_refused(tmp_path: Path):
    path = llama_gguf(tmp_path / "cut.gguf", settings={"block_count": 1})
    with pytest.raises(BackendError) as caught:
        HfBackend(path, threads=TINY_THREADS)
    assert SURPLUS.format(9, "blk.1.attn_k.weight") == str(caught.value)

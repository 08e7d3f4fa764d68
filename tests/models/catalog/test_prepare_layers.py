"""A model without its upper layers: it answers as the whole one would from the layer where it was cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.catalog import prepare
from sds.models.catalog.catalog import embedded_model, prepared
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import BackendError
from tests.model_fixtures import TINY_THREADS
from tests.models.catalog.preparing import OPENVINO_WINS, in_openvino, preparation


@pytest.mark.parametrize("layers", [0, 2, 3])
def test_only_some_of_the_layers_can_be_kept(tiny_path: Callable[[int], Path], tmp_path: Path, layers: int) -> None:
    with pytest.raises(BackendError) as caught:
        preparation(tmp_path).run(tiny_path(1), layers=layers)
    assert f"`{tiny_path(1)}` has 2 layers: 1 to 1 can be kept, not {layers}" == str(caught.value)


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def logits_after(folder: Path, tokens: list[int], layer: int) -> np.ndarray[Any, Any]:
    """The logits of a model that ends after `layer` layers, at the last position, from transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return np.asarray(model.lm_head(model.model.norm(states[layer][0, -1])))


def logits_of(path: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    with closing(LlamaBackend(path, threads=TINY_THREADS)) as backend:
        return backend.forward_one(tokens)


def test_a_model_without_its_upper_layers_answers_as_the_whole_one_would_there(
    tiny_path: Callable[[int], Path],
    tiny_folder: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    tokens = [5, 900, 17, 7_000, 44]
    found, _ = preparation(tmp_path).run(tiny_path(1), layers=1)
    assert f"{found.record.source.sha256[:12]}-BF16-1layers.gguf" == found.path.name
    assert found == prepared(tiny_path(1), tmp_path, layers=1)
    assert prepared(tiny_path(1), tmp_path) is None
    expected = logits_after(tiny_folder(1), tokens, 1)
    assert cosine(expected, logits_of(found.path, tokens)) > 0.999
    assert cosine(expected, logits_of(tiny_path(1), tokens)) < 0.999


@in_openvino
def test_it_may_be_the_fastest_in_openvino_and_answers_the_same_there(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sds.models.openvino_.backend import OpenvinoBackend

    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)
    found, _ = preparation(tmp_path, OPENVINO_WINS).run(tiny_path(1), layers=1)
    assert found.name.startswith("tiny-1.gguf as BF16 through OpenVINO, 1 layers, made from ")
    tokens = [5, 900, 17, 7_000, 44]
    with closing(OpenvinoBackend(found.path, threads=TINY_THREADS, lengths=())) as backend:
        assert cosine(logits_of(found.path, tokens), backend.forward_one(tokens)) > 0.999


def test_the_embedded_model_cut_at_its_twelfth_layer_says_what_transformers_says_there(
    own_checkpoint: Path, tmp_path: Path
) -> None:
    card = prepare._card(embedded_model(), 12)
    cut = prepare._encoded(embedded_model(), tmp_path / "cut.gguf", prepare.TYPES["BF16"], card, 12)
    tokens = [4093, 354, 260, 3530, 282, 253, 12_500, 30]
    assert cosine(logits_after(own_checkpoint, tokens, 12), logits_of(cut, tokens)) > 0.999

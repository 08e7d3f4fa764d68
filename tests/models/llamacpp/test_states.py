"""Models whose memory is one state (Mamba, hybrids), or a window, in llama.cpp: a prompt is what it is read anew, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sds.models.catalog.inspect import inspect_model
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.llamacpp.weights import UNFIT_HINT
from sds.models.protocol import BackendError
from tests.llama_gguf import (
    Sizes,
    hybrid_settings,
    hybrid_tensors,
    llama_gguf,
    mamba_settings,
    mamba_tensors,
    random_tensors,
    windowed_settings,
    windowed_tensors,
)

FOUR = Sizes(layers=4)
Make = Callable[[Path], Path]
STATES: dict[str, Make] = {
    "mamba": lambda at: llama_gguf(at, architecture="mamba", tensors=mamba_tensors(), settings=mamba_settings()),
    "hybrid": lambda at: llama_gguf(at, architecture="jamba", tensors=hybrid_tensors(), settings=hybrid_settings()),
}
WINDOW: dict[str, Make] = {
    "window": lambda at: llama_gguf(
        at, FOUR, architecture="cohere2", tensors=windowed_tensors(FOUR), settings=windowed_settings(16)
    )
}
STATIC, ONE, TWO = "the text of a contract, " * 30, " one case", " another case, longer than a window of sixteen"
# what prompts share: a beginning, all, nothing; and a prompt that is the beginning of the one before
PROMPTS = [(STATIC, ONE, "x" * 40), (STATIC, TWO), (STATIC, TWO), (STATIC,), ("y",), (STATIC, ONE, "x"), (STATIC, ONE)]


def sections(backend: LlamaBackend, texts: tuple[str, ...]) -> list[list[int]]:
    return [backend.tokenize(text.encode(), special=False) for text in texts]


@pytest.mark.parametrize("make", [*STATES.values(), *WINDOW.values()], ids=[*STATES, *WINDOW])
def test_a_prompt_is_the_same_to_the_bit_whatever_ran_before(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path / "m.gguf")
    used = LlamaBackend(path, threads=1)
    for turn, texts in enumerate(PROMPTS * 2):
        used.prefill(sections(used, texts))
        fork = used.fork(0)
        used.forward_one([7, 8] * (1 + 10 * (turn % 2)), slot=fork)
        used.drop(fork)
        fresh = LlamaBackend(path, threads=1)
        fresh.prefill(sections(fresh, texts))
        for token in (5, 6):
            assert np.array_equal(fresh.forward_one([token]), used.forward_one([token])), (turn, texts)
        fresh.close()
    used.close()


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_the_text_that_recurs_is_read_once(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LlamaBackend(make(tmp_path / "m.gguf"), threads=1)
    read: list[int] = []
    decode = backend._decode
    monkeypatch.setattr(backend, "_decode", lambda rows, **how: read.append(len(rows[0].tokens)) or decode(rows, **how))
    first, second = sections(backend, (STATIC, ONE)), sections(backend, (STATIC, TWO))
    backend.prefill(first)
    backend.forward_one([5])
    backend.prefill(second)
    assert [len(first[0]), len(first[1]), 1, len(second[1])] == read
    assert not backend.is_cached(first)
    assert backend.is_cached(second)
    backend.close()


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_one_state_has_one_slot_and_says_what_is_for_several(tmp_path: Path, make: Make) -> None:
    with pytest.raises(BackendError) as refused:
        LlamaBackend(make(tmp_path / "m.gguf"), slots=2)
    assert "a model with recurrent state can decide only one case at a time" == str(refused.value)
    assert "`replicas`" in refused.value.hint


UNFIT = [
    ("llada", "a diffusion model does not write from left to right"),
    ("t5", "a model with an encoder is not supported"),
    ("bert", "an embedding model writes no text"),
]


@pytest.mark.parametrize(("architecture", "why"), UNFIT)
def test_what_does_not_write_from_left_to_right_is_told_from_its_header(
    tmp_path: Path, architecture: str, why: str
) -> None:
    settings = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-5}
    path = llama_gguf(tmp_path / "m.gguf", architecture=architecture, settings=settings)
    with inspect_model(path) as model:
        assert why == model.card.unfit


def test_it_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path / "m.gguf", tensors=random_tensors(), settings={"attention.causal": False})
    with pytest.raises(BackendError, match="an embedding model writes no text") as refused:
        LlamaBackend(path)
    assert UNFIT_HINT == refused.value.hint

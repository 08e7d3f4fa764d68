"""Which card llama.cpp is given: the one that was asked for or none, and on the processor none at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import pytest

from sds.models.llamacpp.backend import LlamaBackend
from sds.models.llamacpp.weights import gpus
from sds.models.protocol import BackendError
from sds.models.text.outlines import DrivenLlama
from tests.model_fixtures import TINY_THREADS


@pytest.mark.parametrize(
    ("device", "found", "message"),
    [
        ("cuda", (), "llama.cpp finds no GPU here"),
        ("cuda:0", (), "llama.cpp finds no GPU 0 here"),
        ("cuda:1", ("one",), "llama.cpp finds no GPU 1 here"),
    ],
)
def test_a_card_that_is_not_there_is_refused_and_nothing_else_runs(
    device: str, found: tuple[str, ...], message: str, single_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: found)
    with pytest.raises(BackendError) as caught:
        LlamaBackend(single_path, device=device)
    assert message == str(caught.value)


def test_the_cards_of_this_machine_can_be_listed():
    """By the library that llama.cpp itself asks: some where it can use one, none otherwise."""
    assert llama_cpp.llama_supports_gpu_offload() == bool(gpus())


@pytest.mark.parametrize(
    ("kinds", "names"),
    [([], ()), ([0, 3], ()), ([0, 2, 1, 3, 1], ("card 2", "card 4")), ([0, 2], ("card 1",)), ([1, 0], ("card 0",))],
)
def test_cards_with_memory_of_their_own_come_before_one_that_shares_the_processors(
    kinds: list[int], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """In ggml's numbers: processor 0, card 1, card in the processor 2, accelerator 3."""
    library = SimpleNamespace(
        ggml_backend_dev_count=lambda: len(kinds),
        ggml_backend_dev_get=lambda number: number,
        ggml_backend_dev_type=lambda device: kinds[device],
        ggml_backend_dev_description=lambda device: f"card {device}".encode(),
    )
    monkeypatch.setattr("llama_cpp._ggml.libggml", library)
    assert names == gpus()


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "cuda:-1", "cuda:100", "cuda:\u0661", ""])
def test_what_is_no_device_is_refused(single_path: Path, device: str):
    with pytest.raises(BackendError) as caught:
        LlamaBackend(single_path, device=device)
    assert (f"`{device}` is not a device", "cpu, cuda or cuda:NUMBER") == (str(caught.value), caught.value.hint)


def test_which_card_is_asked_for_reaches_llama_cpp(single_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the processor nothing may go to a card: a build for one would take long passes there by itself."""
    asked: list[tuple[object, ...]] = []
    load, init = llama_cpp.llama_model_load_from_file, llama_cpp.llama_init_from_model

    def loaded(path: bytes, params: llama_cpp.llama_model_params) -> object:
        asked.append((params.n_gpu_layers, params.split_mode, params.main_gpu))
        return load(path, params)

    def opened(model: object, params: llama_cpp.llama_context_params) -> object:
        asked.append((params.offload_kqv, params.op_offload))
        return init(model, params)

    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("one", "two"))
    monkeypatch.setattr("llama_cpp.llama_model_load_from_file", loaded)
    monkeypatch.setattr("llama_cpp.llama_init_from_model", opened)
    spread, one = llama_cpp.LLAMA_SPLIT_MODE_LAYER, llama_cpp.LLAMA_SPLIT_MODE_NONE
    for device, model, context in (
        ("cpu", (0, one, -1), (False, False)),
        ("cuda", (-1, spread, 0), (True, True)),
        ("cuda:1", (-1, one, 1), (True, True)),
    ):
        asked.clear()
        backend = LlamaBackend(single_path, device=device, threads=TINY_THREADS)
        backend.replica(threads=TINY_THREADS).close()
        backend.close()
        assert [model, context, context] == asked


@pytest.mark.parametrize(
    ("compiled_for", "extra"), [(b"AVX512 = 1 | AMX_INT8 = 1 | ", False), (b"AVX512 = 1 | ", True)]
)
def test_a_build_for_amx_is_not_asked_for_its_products(
    compiled_for: bytes, extra: bool, single_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []
    load = llama_cpp.llama_model_load_from_file

    def loaded(path: bytes, params: llama_cpp.llama_model_params) -> object:
        asked.append(params.use_extra_bufts)
        return load(path, params)

    monkeypatch.setattr("llama_cpp.llama_print_system_info", lambda: compiled_for)
    monkeypatch.setattr("llama_cpp.llama_model_load_from_file", loaded)
    LlamaBackend(single_path, threads=TINY_THREADS).close()
    assert [extra] == asked


def test_a_build_for_amx_is_refused_under_outlines(single_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("outlines")
    monkeypatch.setattr("llama_cpp.llama_print_system_info", lambda: b"AMX_INT8 = 1 | ")
    with pytest.raises(BackendError, match="compiled for AMX") as caught:
        DrivenLlama(single_path, n_ctx=512, threads=TINY_THREADS)
    assert "CMAKE_ARGS" in caught.value.hint


def test_under_outlines_no_card_is_used(single_path: Path):
    pytest.importorskip("outlines")
    driven = DrivenLlama(single_path, n_ctx=512, threads=TINY_THREADS)
    model, context = driven._llama.model_params, driven._llama.context_params
    assert (0, llama_cpp.LLAMA_SPLIT_MODE_NONE, -1) == (model.n_gpu_layers, model.split_mode, model.main_gpu)
    assert (False, False) == (context.offload_kqv, context.op_offload)
    driven.close()

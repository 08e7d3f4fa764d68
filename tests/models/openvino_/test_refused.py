"""What OpenVINO refuses: each in one line, at once, before it could run another model than the file holds."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.engines.factory import runtime_facts
from sds.models.cache import kv_cache
from sds.models.files.cpu import cpu_features
from sds.models.files.llama_weights import LlamaWeights
from sds.models.openvino_ import backend as openvino
from sds.models.openvino_ import dtypes
from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.openvino_.facts import INSTALL_HINT
from sds.models.protocol import BackendError
from tests.llama_gguf import CONTEXT, Sizes, Tensors, llama_gguf, random_tensors
from tests.model_fixtures import TINY_THREADS
from tests.scale import scale, seeded

OTHER = "this model does not run in OpenVINO here: "
SILENT = "`{path}` does not say what its model is like"


def refused(path: Path, **options: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        OpenvinoBackend(path, threads=TINY_THREADS, **{"dtype": "fp32", "lengths": (), **options})
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


def beside(name: str, values: np.ndarray) -> Tensors:
    return random_tensors() | {name: values.astype(np.float32)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("blk.1.ffn_up.weight"), f"{OTHER}it lacks `blk.1.ffn_up.weight`"),
        (without("token_embd.weight"), f"{OTHER}it lacks `token_embd.weight`"),
        ({}, f"{OTHER}it lacks `blk.0.attn_k.weight`"),
        (beside("blk.0.attn_q.bias", np.zeros(32)), f"{OTHER}no use for `blk.0.attn_q.bias`"),
        (beside("blk.2.attn_q.weight", np.ones((32, 32))), f"{OTHER}no use for `blk.2.attn_q.weight`"),
        (shorter("blk.1.ffn_up.weight", 63), f"{OTHER}`blk.1.ffn_up.weight` is of another shape than its settings say"),
        (
            shorter("blk.1.ffn_norm.weight", 1),
            f"{OTHER}`blk.1.ffn_norm.weight` is of another shape than its settings say",
        ),
        (shorter("token_embd.weight", 99), f"{OTHER}`token_embd.weight` is of another shape than its settings say"),
        (
            beside("rope_freqs.weight", np.ones(16)),
            f"{OTHER}`rope_freqs.weight` is of another shape than its settings say",
        ),
        (
            beside("rope_freqs.weight", np.zeros(8)),
            "the weights `rope_freqs.weight` hold a zero, by which no rotation is divided",
        ),
        (spoiled("blk.1.ffn_up.weight", np.nan), "the weights `blk.1.ffn_up.weight` hold what is no number"),
        (spoiled("blk.0.attn_q.weight", np.inf), "the weights `blk.0.attn_q.weight` hold what is no number"),
        (spoiled("token_embd.weight", -np.inf), "the weights `token_embd.weight` hold what is no number"),
        (spoiled("output_norm.weight", np.nan), "the weights `output_norm.weight` hold what is no number"),
        (spoiled("blk.0.ffn_up.weight", 3.4e38), "the weights `blk.0.ffn_up.weight` hold what is no number"),
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
            "llama.cpp runs it",
        ),
        (
            {"rope.dimension_count": 8},
            f"{OTHER}its heads turn in part, or keys and values are of two sizes",
            "llama.cpp runs it",
        ),
        ({"attention.head_count_kv": [1, 1]}, SILENT, "its setting `llama.attention.head_count_kv` is no number"),
        ({"block_count": "two"}, SILENT, "its setting `llama.block_count` is no number"),
        ({"block_count": float("inf")}, SILENT, "its setting `llama.block_count` is no number"),
        ({"rope.freq_base": float("nan")}, SILENT, "the base of its rotation or the epsilon of its norms is no number"),
        ({"attention.head_count": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.head_count_kv": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.key_length": 0}, SILENT, "one of its sizes is not positive"),
        ({"context_length": 0}, SILENT, "one of its sizes is not positive"),
        ({"block_count": 0}, SILENT, "one of its sizes is not positive"),
        ({"attention.head_count": 3, "attention.head_count_kv": 2}, SILENT, "heads cannot be shared evenly or halved"),
        ({"block_count": 10**9}, f"{OTHER}it lacks `blk.10.attn_k.weight`", "llama.cpp runs it"),
        (
            {"embedding_length": 10**12},
            f"{OTHER}`blk.0.attn_k.weight` is of another shape than its settings say",
            "llama.cpp runs it",
        ),
        (
            {"feed_forward_length": 10**12},
            f"{OTHER}`blk.0.ffn_down.weight` is of another shape than its settings say",
            "llama.cpp runs it",
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


def test_a_context_beyond_all_measure_costs_no_memory(tmp_path: Path):
    backend = OpenvinoBackend(
        llama_gguf(tmp_path / "model.gguf", settings={"context_length": 10**12}), dtype="fp32", threads=TINY_THREADS
    )
    assert 4096 == backend.context_tokens_max
    backend.close()


def test_the_context_is_never_longer_than_the_model_was_made_for(tmp_path: Path):
    backend = OpenvinoBackend(llama_gguf(tmp_path / "model.gguf"), dtype="fp32", threads=TINY_THREADS, lengths=())
    with pytest.raises(BackendError, match=f"{CONTEXT + 1} tokens are more than the model's context of {CONTEXT}"):
        backend.prefill([[20] * (CONTEXT + 1)])
    backend.close()


def test_more_slots_than_there_is_memory_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = llama_gguf(tmp_path / "model.gguf")

    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(kv_cache.mmap, "mmap", full)
    error = refused(path, slots=64)
    assert (f"OpenVINO cannot run `{path}`: no memory", "use a smaller model or prompt") == (str(error), error.hint)


def test_no_memory_left_for_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = llama_gguf(tmp_path / "model.gguf")

    def full(*_: object, **__: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(openvino, "batches_of", full)
    error = refused(path)
    assert (f"OpenVINO cannot run `{path}`: no memory", "use a smaller model or prompt") == (str(error), error.hint)


def test_another_architecture(tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2", 1))
    error = refused(path)
    assert "GGUF files of the architecture `llama` run in OpenVINO here, not `qwen2`" == str(error)


@pytest.mark.parametrize("kept", [4, 20, 1000, 60_000])
def test_a_file_that_is_cut_off(kept: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = llama_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    assert f"`{path}` is damaged or of a kind this llama.cpp does not know" == str(refused(path))
    with pytest.raises(BackendError, match="is damaged or of a kind that is not known here"):
        LlamaWeights(path, "OpenVINO")
    assert ("", "") == tuple(capfd.readouterr())


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
            weights = LlamaWeights(path, "OpenVINO")
            words = weights["token_embd.weight"]
        except BackendError:
            found[False] += 1
        else:
            assert weights.shape.vocab_size == len(words)
            found[True] += 1
    assert min(found.values()) > 10


def test_a_missing_file_and_a_folder(tmp_path: Path):
    assert f"`{tmp_path / 'none'}` cannot be read: no such file or directory" == str(refused(tmp_path / "none"))
    assert f"`{tmp_path}` cannot be read: is a directory" == str(refused(tmp_path))


def test_a_type_it_does_not_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "unread.gguf"
    error = refused(path, dtype="fp16")
    assert ("OpenVINO does not compute in fp16 here", "choose fp32, bf16, int8, int8-bf16") == (str(error), error.hint)
    monkeypatch.setattr(dtypes, "WHOLE_PRODUCTS", cpu_features())
    monkeypatch.setattr(dtypes, "computes_in_bf16", lambda: False)
    for dtype, mend in (("bf16", "fp32"), ("int8-bf16", "int8")):
        error = refused(path, dtype=dtype)
        assert ("this processor does not compute in bf16", f"choose {mend}") == (str(error), error.hint)
    monkeypatch.setattr(dtypes, "WHOLE_PRODUCTS", {"none"})
    for in_bf16, dtype, mend in ((True, "int8", "fp32"), (True, "int8-bf16", "bf16"), (False, "int8-bf16", "fp32")):
        monkeypatch.setattr(dtypes, "computes_in_bf16", lambda found=in_bf16: found)
        error = refused(path, dtype=dtype)
        assert ("this processor does not compute in int8", f"choose {mend}") == (str(error), error.hint)


@pytest.mark.parametrize(("in_bf16", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_where_nobody_says_it_it_computes_in_what_the_processor_does(
    monkeypatch: pytest.MonkeyPatch, in_bf16: bool, dtype: str
):
    monkeypatch.setattr(dtypes, "computes_in_bf16", lambda: in_bf16)
    assert dtype == OpenvinoBackend.usual_dtype() == runtime_facts("openvino")["dtype"]


def test_without_the_library_the_mend_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "sds.models.openvino_.backend")
    with pytest.raises(BackendError) as caught:
        importlib.import_module("sds.models.openvino_.backend")
    assert "OpenVINO is not installed" == str(caught.value)
    assert INSTALL_HINT == caught.value.hint


def test_a_file_that_was_replaced_is_refused_as_often_as_it_is_compiled_anew(tmp_path: Path):
    """After a call that failed: what lies there now is not what the record names."""
    path = llama_gguf(tmp_path / "model.gguf")
    backend = OpenvinoBackend(path, dtype="fp32", threads=TINY_THREADS, lengths=())
    os.utime(path, (1, 1))
    backend._graph.reset()
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            backend.forward_one([20, 21])
        assert f"`{path}` was changed while it was opened" in str(caught.value)
    backend.close()


def test_a_backend_beside_one_whose_file_was_replaced_is_refused(tmp_path: Path):
    """It would read other words than its weights were made for."""
    path = llama_gguf(tmp_path / "model.gguf")
    backend = OpenvinoBackend(path, dtype="fp32", threads=TINY_THREADS, lengths=())
    shutil.copyfile(llama_gguf(tmp_path / "other.gguf", Sizes(layers=1)), path)
    with pytest.raises(BackendError) as caught:
        backend.replica(threads=TINY_THREADS)
    assert f"`{path}` was changed while it was opened" == str(caught.value)
    backend.close()

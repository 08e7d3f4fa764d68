"""What OpenVINO refuses: each in one line, at once, before it could run another model than the file holds."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from sds.engines.factory import runtime_facts
from sds.models.cache import kv_cache
from sds.models.files.cpu import cpu_features
from sds.models.openvino_ import backend as openvino
from sds.models.openvino_ import names
from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.openvino_.names import INSTALL_HINT, usual_dtype
from sds.models.protocol import BackendError
from tests.llama_gguf import CONTEXT, Sizes, llama_gguf
from tests.model_fixtures import TINY_THREADS


def refused(path: Path, **options: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        OpenvinoBackend(path, threads=TINY_THREADS, **{"dtype": "fp32", "lengths": (), **options})
    assert "\n" not in str(caught.value) + caught.value.hint
    return caught.value


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


def test_a_missing_file_and_a_folder(tmp_path: Path):
    assert f"`{tmp_path / 'none'}` cannot be read: no such file or directory" == str(refused(tmp_path / "none"))
    assert f"`{tmp_path}` cannot be read: is a directory" == str(refused(tmp_path))


def test_a_type_it_does_not_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "unread.gguf"
    error = refused(path, dtype="fp16")
    assert ("OpenVINO does not support the dtype fp16 here", "choose fp32, bf16, int8, int8-bf16") == (
        str(error),
        error.hint,
    )
    monkeypatch.setattr(names, "WHOLE_PRODUCTS", cpu_features())
    monkeypatch.setattr(names, "computes_in_bf16", lambda: False)
    for dtype, mend in (("bf16", "fp32"), ("int8-bf16", "int8")):
        error = refused(path, dtype=dtype)
        assert ("this processor does not compute in bf16", f"choose {mend}") == (str(error), error.hint)
    monkeypatch.setattr(names, "WHOLE_PRODUCTS", {"none"})
    for in_bf16, dtype, mend in ((True, "int8", "fp32"), (True, "int8-bf16", "bf16"), (False, "int8-bf16", "fp32")):
        monkeypatch.setattr(names, "computes_in_bf16", lambda found=in_bf16: found)
        error = refused(path, dtype=dtype)
        assert ("this processor does not compute in int8", f"choose {mend}") == (str(error), error.hint)


@pytest.mark.parametrize(("in_bf16", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_where_nobody_says_it_it_computes_in_what_the_processor_does(
    monkeypatch: pytest.MonkeyPatch, in_bf16: bool, dtype: str
):
    monkeypatch.setattr(names, "computes_in_bf16", lambda: in_bf16)
    assert dtype == usual_dtype() == runtime_facts("openvino")["dtype"]


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

"""What integer passes refuse, in one line with its mend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sds.models.int8 import backend as integer
from sds.models.int8 import library
from sds.models.int8.backend import IntegerBackend
from sds.models.int8.library import INSTALL_HINT, PassesLibrary
from sds.models.protocol import BackendError
from tests.llama_gguf import Sizes, llama_gguf
from tests.models.int8.libraries import stale

OWN = Sizes(head=32)


def refused(path: Path, **options: object) -> tuple[str, str]:
    with pytest.raises(BackendError) as caught:
        IntegerBackend(path, **options)  # type: ignore[arg-type]
    return str(caught.value), caught.value.hint


@pytest.mark.parametrize("head", [24, 544])
def test_heads_that_do_not_fill_registers_or_are_too_wide(head: int, tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", Sizes(head=head))
    assert ("integer passes run heads of multiples of 32 numbers, up to 512", "choose llamacpp") == refused(path)


def test_another_architecture_and_what_its_settings_do_not_know(tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", OWN, settings={"rope.scaling.type": "yarn"})
    said = "this model does not run in integer passes here: its setting `llama.rope.scaling.type` is not known"
    assert (said, "choose llamacpp") == refused(path)


def test_a_type_they_do_not_compute_in(tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", OWN)
    assert ("integer passes do not support the dtype bf16", "choose int8 or int16") == refused(path, dtype="bf16")


@pytest.mark.parametrize("features", ["", "avx", "avx2", "avx512f avx512_vnni fma"])
def test_another_processor(features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "cpu_features", lambda: set(features.split()))
    said = "integer passes need a processor with AVX2, or with AVX-512 and VNNI"
    assert (said, "choose llamacpp or openvino") == refused(llama_gguf(tmp_path / "model.gguf", OWN))


def test_what_was_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "PASSES", tmp_path)
    library.library.cache_clear()
    try:
        with pytest.raises(BackendError) as caught:
            library.library()
    finally:
        library.library.cache_clear()
    assert ("the integer passes are not compiled", INSTALL_HINT) == (str(caught.value), caught.value.hint)


def test_what_was_compiled_of_other_sources_or_is_no_library(tmp_path: Path):
    no_library = tmp_path / "passes.so"
    no_library.write_bytes(b"no library")
    for path, said in (
        (stale(tmp_path / "other.so"), "`other.so` was compiled from other sources"),
        (no_library, "`passes.so` cannot be loaded"),
    ):
        with pytest.raises(BackendError) as caught:
            PassesLibrary(path)
        assert (said, INSTALL_HINT) == (str(caught.value), caught.value.hint)


@pytest.mark.parametrize("call", ["model", "layer", "ends", "engine"])
def test_no_memory_while_it_is_opened(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, real = llama_gguf(tmp_path / "model.gguf", OWN), PassesLibrary.call

    def full(self: PassesLibrary, name: str, *arguments: object) -> None:
        if name == call:
            raise MemoryError
        real(self, name, *arguments)

    monkeypatch.setattr(PassesLibrary, "call", full)
    said = f"integer passes cannot run `{path}`: no memory"
    assert (said, "use a smaller model or prompt") == refused(path)


def test_no_memory_for_a_pass_ends_that_prompt_alone(tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch):
    backend, real = IntegerBackend(tiny_path(1), threads=1), PassesLibrary.call
    backend.prefill([[20, 21]])
    expected = backend.forward_one([22])

    def full(self: PassesLibrary, name: str, *arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PassesLibrary, "call", full)
    with pytest.raises(BackendError, match="the model could not be run on 1 tokens: no memory"):
        backend.forward_one([23])
    monkeypatch.setattr(PassesLibrary, "call", real)
    backend.prefill([[20, 21]])
    assert (expected == backend.forward_one([22])).all()
    backend.close()


def test_a_file_that_was_replaced_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, real = llama_gguf(tmp_path / "model.gguf", OWN), integer.PackedModel

    def replaced(*arguments: object, **options: object) -> object:
        found = real(*arguments, **options)  # type: ignore[arg-type]
        llama_gguf(tmp_path / "other.gguf", replace(OWN, layers=1)).replace(path)
        return found

    monkeypatch.setattr(integer, "PackedModel", replaced)
    assert (f"`{path}` was changed while it was opened", "open it again") == refused(path)


WITHOUT_THREADS = """
import resource, sys
from pathlib import Path
from sds.models.int8.backend import IntegerBackend
from sds.models.protocol import BackendError
backend = IntegerBackend(Path(sys.argv[1]), threads=1)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    backend.replica(threads=2000)
except BackendError as error:
    print(error)
backend.prefill([[20]])
print(backend.forward_one([21]).shape[0] == backend.vocab_size)
"""


def test_no_threads_left_is_said_and_ends_nobody(tmp_path: Path):
    path = llama_gguf(tmp_path / "model.gguf", OWN)
    command = [sys.executable, "-c", WITHOUT_THREADS, str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert f"integer passes cannot run `{path}`: no memory\nTrue\n" == said

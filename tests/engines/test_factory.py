"""What each backend says of itself is what opening a model and reading a record go by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.engines.factory import library_of_record, open_backend, runtime_facts
from sds.models.catalog.backends import BACKENDS, library_for
from sds.models.protocol import BackendError

HERE = [name for name, backend in BACKENDS.items() if backend.version()]


@pytest.mark.parametrize("name", HERE)
def test_every_backend_is_found_again_in_the_facts_it_leaves(name: str) -> None:
    assert name == library_of_record(json.loads(json.dumps(runtime_facts(name))))


def test_a_record_of_a_library_that_is_not_ours_names_none() -> None:
    assert [None, None] == [library_of_record({}), library_of_record({"library": "vllm 1.0"})]


def test_a_folder_runs_in_transformers_and_a_file_in_llama_cpp() -> None:
    assert ["transformers", "llamacpp"] == [library_for(folder=folder) for folder in (True, False)]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_backend_does_not_take_is_refused_in_one_line_before_it_is_loaded(name: str, tmp_path: Path) -> None:
    backend, file = BACKENDS[name], tmp_path / "unread.gguf"
    refused = []
    if not backend.reads_folders:
        refused.append(({"path": tmp_path}, f"`{tmp_path}` is a folder: {backend.title} runs GGUF files here"))
    if not backend.on_gpus:
        refused.append(({"path": file, "device": "cuda"}, f"{backend.title} runs on the processor only"))
    if not backend.dtypes:
        refused.append(({"path": file, "dtype": "bf16"}, f"{backend.title} always computes in the file's own types"))
    for asked, said in refused:
        with pytest.raises(BackendError) as error:
            open_backend(library=name, **asked)  # type: ignore[arg-type]  # one of the above
        assert said == str(error.value)
        assert error.value.hint

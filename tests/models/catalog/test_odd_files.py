"""Model files that are odd rather than cut short: refused in one line by every reader, and nothing of them stays in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from sds.models.catalog.inspect import inspect_model
from sds.models.files.safetensors import read_safetensors
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.llamacpp.weights import load_gguf, tokenizer_of
from sds.models.protocol import BackendError
from sds.models.transformers_.backend import HfBackend
from tests.llama_gguf import llama_gguf
from tests.model_fixtures import TINY_THREADS
from tests.small_models import sentencepiece_gguf

DEEP = b"[" * 100_000
TOO_MANY = 10**12


@pytest.fixture
def folder(tiny_folder: Callable[[int], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(1), tmp_path / "mine"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def shaped(shape: str) -> bytes:
    return header(b'{"w":{"dtype":"F16","shape":[%s],"data_offsets":[0,4]}}' % shape.encode()) + bytes(4)


def said(path: Path, opener: Callable[[Path], object]) -> str:
    with pytest.raises(BackendError) as caught:
        opener(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def inspected(path: Path) -> None:
    with inspect_model(path):
        pass


@pytest.fixture
def mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a GGUF whose chat template is no UTF-8."""
    real = gguf.GGUFWriter.write_header_to_file

    def with_template(self: gguf.GGUFWriter, path: Path | None = None) -> None:
        self.add_key_value("tokenizer.chat_template", b"\xff{{", gguf.GGUFValueType.STRING)
        real(self, path)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_template)
    return llama_gguf(tmp_path / "template.gguf")


@pytest.mark.parametrize(
    "opener", [inspected, tokenizer_of, lambda path: LlamaBackend(path, threads=TINY_THREADS).frame()]
)
def test_a_chat_template_that_is_no_text_is_refused(opener: Callable[[Path], object], mistaken: Path):
    assert "the chat template of the model is not UTF-8" == said(mistaken, opener)


def test_a_first_token_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_bos_token_id", lambda self, _: self.add_uint32("tokenizer.ggml.bos_token_id", 3 + 255)
    )
    path = llama_gguf(tmp_path / "bos.gguf")
    with inspect_model(path) as model:
        assert model.card.turn is None
    backend = LlamaBackend(path, threads=TINY_THREADS)
    with pytest.raises(BackendError, match="a control token of the model is not UTF-8"):
        backend.frame()
    backend.close()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", DEEP, "`{0}/tokenizer.json` is not JSON"),
        ("tokenizer_config.json", DEEP, "`{0}/tokenizer_config.json` is not JSON"),
        ("chat_template.jinja", b"\xff", "the tokenizer of `{0}` is damaged"),
        ("model.safetensors", header(DEEP), "`{0}/model.safetensors` is not a safetensors file"),
        ("model.safetensors", shaped("1e999"), "`{0}/model.safetensors` is not a safetensors file"),
        ("model.safetensors", shaped("1e300"), "`{0}/model.safetensors` is not a safetensors file"),
    ],
)
def test_an_odd_folder_says_where(file: str, content: bytes, message: str, folder: Path):
    (folder / file).write_bytes(content)
    assert message.format(folder) == said(folder, inspected)
    if file == "model.safetensors":
        assert message.format(folder) == said(folder, read_safetensors)
    else:
        said(folder, lambda path: HfBackend(path, threads=TINY_THREADS))


def test_a_vocabulary_beyond_any_is_refused_before_it_takes_memory(folder: Path):
    edit(folder / "config.json", vocab_size=TOO_MANY)
    assert f"a vocabulary of {TOO_MANY} tokens is larger than the limit of 16777216" == said(folder, inspected)


def test_a_number_of_layers_that_is_none_is_not_told(folder: Path):
    edit(folder / "config.json", num_hidden_layers="9" * 5000)
    with inspect_model(folder) as model:
        assert 0 == model.card.layers


def mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_model_whose_words_are_refused_is_freed(tmp_path: Path):
    path = sentencepiece_gguf(tmp_path / "lacking.gguf", without=b"{9")
    for _ in range(3):
        assert "the tokenizer has no token for 2 of 256 bytes" == said(path, load_gguf)
    assert 0 == mappings(path)


def test_a_model_whose_template_is_refused_is_freed(mistaken: Path):
    said(mistaken, tokenizer_of)
    assert 0 == mappings(mistaken)

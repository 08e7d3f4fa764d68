"""What a model says of itself, and what is no model: read without weights, refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from sds.models.catalog.catalog import embedded_model, models_in
from sds.models.catalog.inspect import inspect_model
from sds.models.protocol import Backend, BackendError, ChatFrame
from sds.models.transformers_.backend import HfBackend
from tests.hostile import TINY_VOCABULARY
from tests.model_fixtures import TINY_THREADS
from tests.small_models import sentencepiece_gguf

CHATML = ChatFrame("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def folder(tiny_folder: Callable[[int], Path], tmp_path: Path) -> Path:
    """Return a checkpoint folder of one's own, to damage."""
    return Path(shutil.copytree(tiny_folder(1), tmp_path / "mine"))


def refusal(path: Path) -> BackendError:
    with pytest.raises(BackendError) as caught, inspect_model(path):
        pass
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_gguf_is_known_from_its_header():
    path = embedded_model()
    with inspect_model(path) as model:
        card = model.card
    assert ("GGUF", "llama", 134_515_008, "Q4_1") == (card.form, card.architecture, card.parameters, card.weights)
    assert (8192, 49152, "gpt2 smollm") == (card.context_tokens, card.vocabulary_tokens, card.tokenizer)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card.sha256
    assert (path.stat().st_size, True, CHATML, True) == (
        card.file_bytes,
        card.has_chat_template,
        card.turn,
        card.splits_digits,
    )


def test_a_checkpoint_folder_is_known_from_its_files(folder: Path, tiny_hf: Backend):
    with inspect_model(folder) as model:
        card = model.card
    assert ("mine", "checkpoint folder", "LlamaForCausalLM") == (card.name, card.form, card.architecture)
    assert (74_048 + 64 * TINY_VOCABULARY, "F16", 8192, TINY_VOCABULARY, "BPE") == (
        card.parameters,
        card.weights,
        card.context_tokens,
        card.vocabulary_tokens,
        card.tokenizer,
    )
    assert (CHATML, True) == (card.turn, card.splits_digits)
    assert (tiny_hf.fingerprint, tiny_hf.frame()) == (card.sha256, card.turn)  # as the record names it


def test_the_vocabulary_of_both_forms_is_one(folder: Path, tiny_path: Callable[[int], Path]):
    text = b'late <|im_end|> {"amount":150.05}'
    with inspect_model(folder) as other, inspect_model(tiny_path(1)) as file:
        assert other.words.encode(text, special=True) == file.words.encode(text, special=True)


def test_a_tokenizer_that_joins_digits_and_has_no_template_is_told_apart(tmp_path: Path):
    with inspect_model(sentencepiece_gguf(tmp_path / "other.gguf")) as model:
        card = model.card
    assert ("F32", 4096, "llama", False, False) == (
        card.weights,
        card.context_tokens,
        card.tokenizer,
        card.splits_digits,
        card.has_chat_template,
    )


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("llama", ""),
        ("of_tomorrow", "transformers does not know this architecture, or cannot read its config.json"),
        ("vit", "transformers has no model of this kind that writes text"),
    ],
)
def test_a_folder_that_transformers_cannot_run_is_unfit(model_type: str, why: str, folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with inspect_model(folder) as model:
        assert why == model.card.unfit
    with nullcontext() if not why else pytest.raises(BackendError, match="of a kind that transformers does not know"):
        HfBackend(folder, threads=TINY_THREADS).close()


def test_without_torch_nothing_is_said_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "sds.models.transformers_.loading")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "vocab_size": TINY_VOCABULARY}))
    with inspect_model(folder) as model:
        assert "" == model.card.unfit


def test_after_the_inspection_its_words_are_gone():
    with inspect_model(embedded_model()) as model:
        words = model.words
    with pytest.raises(BackendError, match="the model is closed"):
        words.encode(b"x", special=False)


def test_a_template_without_a_turn_is_no_error_here(folder: Path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "nothing of yours"}))
    with inspect_model(folder) as model:
        assert (True, None) == (model.card.has_chat_template, model.card.turn)


@pytest.mark.parametrize("kept", [4, 20, 200, 1000, 300_000, -1, -1_000_000])
def test_a_gguf_that_is_cut_short_is_refused_without_noise(
    kept: int, tiny_path: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path(1).read_bytes()[:kept])
    said = str(refusal(path))
    assert said in {
        f"`{path}` has no vocabulary, or the file ends before it",
        f"`{path}` is damaged or of a kind that this llama.cpp does not know",
    }
    assert ("", "") == tuple(capfd.readouterr())


def test_a_gguf_without_a_vocabulary_is_refused(tmp_path: Path):
    error = refusal(sentencepiece_gguf(tmp_path / "bare.gguf", vocabulary=False))
    assert f"`{tmp_path / 'bare.gguf'}` has no vocabulary, or the file ends before it" == str(error)
    assert "name the GGUF file of a whole model" in error.hint


def test_words_that_lack_a_byte_are_refused_before_they_end_the_process(tmp_path: Path):
    error = refusal(sentencepiece_gguf(tmp_path / "lacking.gguf", without=b"{9"))
    assert "the tokenizer has no token for 2 of 256 bytes" == str(error)


def test_what_is_no_model_is_refused(tmp_path: Path):
    text, folder = tmp_path / "text", tmp_path / "folder"
    text.write_text("hello")
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert f"`{tmp_path / 'pipe'}` is neither a file nor a folder" == str(refusal(tmp_path / "pipe"))
    assert f"`{tmp_path / 'none'}` cannot be read: no such file or directory" == str(refusal(tmp_path / "none"))
    assert f"`{text}` is not a GGUF file" == str(refusal(text))
    assert f"`{folder}` is not a checkpoint: it has no config.json" == str(refusal(folder))


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("config.json", "`{0}` is not a checkpoint: it has no config.json"),
        ("model.safetensors", "`{0}` holds no safetensors files"),
        ("tokenizer.json", "`{0}` has no tokenizer.json"),
    ],
)
def test_a_folder_that_lacks_a_file_says_which(lacking: str, message: str, folder: Path):
    (folder / lacking).unlink()
    assert message.format(folder) == str(refusal(folder))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "`{0}/config.json` is not JSON"),
        ("config.json", b"[]", "`{0}/config.json` is not a JSON object"),
        ("config.json", b" " * ((1 << 20) + 1), "`{0}/config.json` is larger than 1048576 bytes"),
        ("config.json", b"{}", "`{0}/config.json` names no vocab_size"),
        ("config.json", b'{"vocab_size":1000}', "the tokenizer has tokens beyond the model's 1000"),
        ("tokenizer.json", b"{}", "the tokenizer.json is damaged or of a kind this library does not know"),
        (
            "tokenizer_config.json",
            b'{"eos_token":"<|im_end|>","added_tokens_decoder":[]}',
            "the tokenizer of `{0}` is damaged",
        ),
        ("model.safetensors", b"", "`{0}/model.safetensors` is not a safetensors file, or is cut short"),
        ("model.safetensors", b"\xff" * 99, "`{0}/model.safetensors` is not a safetensors file, or is cut short"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "`{0}/model.safetensors` is not a safetensors file"),
        (
            "model.safetensors",
            b"\x3a" + bytes(7) + b'{"w":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}    ',
            "`{0}/model.safetensors` is cut short: 66 of 70 bytes",
        ),
    ],
)
def test_a_damaged_folder_says_where(file: str, content: bytes, message: str, folder: Path):
    (folder / file).write_bytes(content)
    assert message.format(folder) == str(refusal(folder))


def test_models_of_ones_own_are_listed_by_name_and_nothing_else(folder: Path, tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    assert [tmp_path / "a.gguf", folder] == models_in(tmp_path)
    assert [] == models_in(tmp_path / "absent")
    with pytest.raises(BackendError, match=r"`.*a\.gguf` cannot be read: not a directory"):
        models_in(tmp_path / "a.gguf")

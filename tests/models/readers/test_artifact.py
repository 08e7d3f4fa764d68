"""A reader's folder: what is run is what was fitted, or one line says why not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from sds.models.readers import artifact
from sds.models.readers.artifact import read_artifact, write_artifact
from sds.models.readers.onnx_form import check_onnx
from sds.models.readers.opening import open_reader
from sds.models.readers.protocol import ReaderError


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def edit(folder: Path, **changes: object) -> None:
    file = folder / "reader.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def link(folder: Path) -> None:
    file = folder / "model.onnx"
    file.rename(folder.parent / "elsewhere.onnx")
    file.symlink_to(folder.parent / "elsewhere.onnx")


def as_folder(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").mkdir()


def as_pipe(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")


def values(folder: Path, *names: str) -> None:
    edit(folder, values=list(names))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of the model": (lambda folder: flip(folder / "model.onnx"), "model.onnx` has changed since it was fitted: its hash differs"),
    "a byte of the tokenizer": (lambda folder: flip(folder / "tokenizer.json"), "tokenizer.json` has changed since it was fitted: its hash differs"),
    "a longer model": (lambda folder: (folder / "model.onnx").write_bytes(b"x"), "its hash differs"),
    "no model": (lambda folder: (folder / "model.onnx").unlink(), "model.onnx` cannot be read: no such file or directory"),
    "no manifest": (lambda folder: (folder / "reader.json").unlink(), "reader.json` cannot be read: no such file or directory"),
    "a link": (link, "model.onnx` cannot be read: it is a link"),
    "a folder for a file": (as_folder, "model.onnx` cannot be read: is a directory"),
    "a pipe": (as_pipe, "model.onnx` is not a regular file"),
    "no JSON": (lambda folder: (folder / "reader.json").write_text("{"), "reader.json` is not JSON"),
    "a list": (lambda folder: (folder / "reader.json").write_text("[]"), "reader.json` is of schema `None`, not `sds.reader/1`"),
    "deep JSON": (lambda folder: (folder / "reader.json").write_text("[" * 100_000), "reader.json` is not JSON"),
    "another schema": (lambda folder: edit(folder, schema="sds.reader/2"), "is of schema `sds.reader/2`, not `sds.reader/1`"),
    "another key": (lambda folder: edit(folder, more=1), "is not as it was written: more"),
    "a value twice": (lambda folder: values(folder, "crew", "crew"), "is not as it was written: the whole"),
    "too many values": (lambda folder: values(folder, *map(str, range(33))), "is not as it was written: values"),
    "a table's calibration": (lambda folder: edit(folder, calibration={"method": "sigmoid", "slope": 1, "offset": 0}), "is not as it was written: the whole"),
    "no familiarity": (lambda folder: edit(folder, familiarity=None), "is not as it was written: the whole"),
    "a path for a name": (lambda folder: edit(folder, files={"../model.onnx": {"sha256": "0" * 64, "bytes": 1}}), "is not as it was written: files"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_as_it_was_fitted_is_refused_in_one_line(head_folder: Path, damage: str) -> None:
    change, expected = DAMAGES[damage]
    change(head_folder)
    with pytest.raises(ReaderError) as raised:
        open_reader(head_folder)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.hint


def test_a_manifest_of_another_hash_is_refused(head_folder: Path) -> None:
    expected = hashlib.sha256((head_folder / "reader.json").read_bytes()).hexdigest()
    assert expected == open_reader(head_folder, sha256=expected).sha256
    with pytest.raises(ReaderError, match="has changed since it was fitted"):
        open_reader(head_folder, sha256="0" * 64)


def test_a_file_that_is_too_large_is_not_read(head_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "FILE_BYTES_MAX", 1000)
    with pytest.raises(ReaderError, match="is larger than 1000 bytes"):
        open_reader(head_folder)


def test_a_model_with_another_number_of_values_is_refused(head_folder: Path) -> None:
    values(head_folder, "weather", "crew")
    with pytest.raises(ReaderError, match=r"reader\.json differ in the number of values"):
        open_reader(head_folder).read("late")


def test_a_tokenizer_that_is_none_is_refused(head_folder: Path) -> None:
    (head_folder / "tokenizer.json").write_bytes(b"{}")
    told = json.loads((head_folder / "reader.json").read_text())
    told["files"]["tokenizer.json"] = {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}
    edit(head_folder, files=told["files"])
    with pytest.raises(ReaderError, match=r"a tokenizer.json cannot be read"):
        open_reader(head_folder)


def test_what_is_written_is_what_is_read(head_folder: Path, tmp_path: Path) -> None:
    whole = read_artifact(head_folder)
    assert whole.sha256 == write_artifact(whole, tmp_path / "again")
    assert (head_folder / "reader.json").read_bytes() == (tmp_path / "again" / "reader.json").read_bytes()
    with pytest.raises(ReaderError, match="is not empty"):
        write_artifact(whole, tmp_path / "again")


def model(node: onnx.NodeProto, *constants: onnx.TensorProto, domain: str = "") -> bytes:
    shape = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [node], "g", [shape], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])], list(constants)
    )
    opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())


def outside(name: str) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../etc/passwd")
    return tensor


def hidden(node: onnx.NodeProto) -> onnx.NodeProto:
    """Put a node into the branch of another one."""
    branch = helper.make_graph([node], "b", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    return helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)


FOREIGN = helper.make_node("Anything", ["x"], ["y"], domain="com.example")
FORMS = {
    "another's operator": (model(FOREIGN, domain="com.example"), "a model uses operators of `com.example`, which are not standard"),
    "one in a branch": (model(hidden(FOREIGN), domain="com.example"), "a model uses operators of `com.example`, which are not standard"),
    "numbers in another file": (model(helper.make_node("Add", ["x", "w"], ["y"]), outside("w")), "a model refers to weights in another file"),
    "a constant in another file": (model(helper.make_node("Constant", [], ["y"], value=outside("v"))), "a model refers to weights in another file"),
    "nothing": (b"", "a model is not an ONNX file"),
    "no ONNX": (b"PK\x03\x04 pickled", "a model is not an ONNX file"),
    "cut short": (model(helper.make_node("Relu", ["x"], ["y"]))[:-5], "a model is not an ONNX file"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_not_standard_and_whole_is_refused(form: str) -> None:
    content, expected = FORMS[form]
    with pytest.raises(ReaderError) as raised:
        check_onnx(content)
    assert expected == str(raised.value)


def test_a_standard_model_passes() -> None:
    check_onnx(model(helper.make_node("Relu", ["x"], ["y"])))

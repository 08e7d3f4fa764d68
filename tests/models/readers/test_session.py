"""What a session does beside running its model: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onnx import TensorProto, helper

OPENS_ONE = "import sys; from sds.models.readers.session import Session; Session(open(sys.argv[1], 'rb').read())"


def identity() -> bytes:
    """Return a model that gives one number back, in a form that every supported onnxruntime reads."""
    given, found = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("given", "found"))
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["found"])], "identity", [given], [found])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def test_the_library_keeps_no_id_of_the_machine_and_queues_nothing_for_its_maker(tmp_path: Path):
    """What it would send it first writes to the user's cache folder."""
    users = tmp_path / "home"
    users.mkdir()
    (tmp_path / "model.onnx").write_bytes(identity())
    kept = {"HOME": str(users), "XDG_CACHE_HOME": str(users / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | kept
    command = [sys.executable, "-c", OPENS_ONE, str(tmp_path / "model.onnx")]
    subprocess.run(command, env=environment, check=True)
    assert [] == list(users.rglob("*"))

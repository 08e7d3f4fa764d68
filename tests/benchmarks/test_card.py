"""The kit for a card, tried without one: packed, installed from its folder and run on the processor, with a tiny shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sds.benchmarks import gpu
from sds.benchmarks.card import pack
from sds.benchmarks.card.checkpoint import EMBEDDED, SHAPES
from sds.models.catalog.catalog import embedded_model

ROOT = Path(__file__).parents[2]
CARD = ROOT / "benchmarks" / "card"
# This Python, but for how many packets are decided before the measured ones: 64 would be most of the test's time.
PYTHON = f"""#!{sys.executable}
import runpy, sys
sys.argv = sys.argv[2:]
if sys.argv[0].startswith("sds."):
    from sds.benchmarks.lib import packets
    packets.EARLIER = 2
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("bin") / "python"
    made.write_text(PYTHON, encoding="utf-8")
    made.chmod(0o700)
    return str(made)


def _run(command: list[str], python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = {"PYTHON": python, "PYTHONPATH": str(ROOT), "HATCH_BUILD_NO_HOOKS": "true"}  # compiled in test_wheel
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | here | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def kit(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed without a network: ours alone, for what it needs is installed here."""
    folder = tmp_path_factory.mktemp("card") / "kit"
    made = _run([str(CARD / "kit.sh"), str(folder)], python, OFFLINE="1", N="2")
    assert (0, "") == (made.returncode, made.stderr if made.returncode else "")
    return folder


def test_a_kit_holds_wheels_packets_and_a_tokenizer_and_says_how_large_it_is(kit: Path) -> None:
    assert {"wheels", "tokenizer", "packets.pickle", "run.sh"} == {path.name for path in kit.iterdir()}
    (wheel,) = (kit / "wheels").iterdir()
    assert wheel.name.startswith("sovereign_decision_stream-")
    none = "true"  # all is there, so that nothing has to be made again
    small = _run([str(CARD / "kit.sh"), str(kit)], none, OFFLINE="1", KIT_MB_MAX="0")
    assert (1, "error: over 0 MB\n") == (small.returncode, small.stderr)


def test_a_kit_runs_in_one_call_and_keeps_a_document_and_a_page(kit: Path, python: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["--device", "cpu", "--shapes", "tiny", "--n", "1", "--at-once", "2"]  # with one slot and with two
    ran = _run([str(kit / "run.sh"), str(out), *asked], python, MINUTES="5", PYTHONPATH="")
    assert 0 == ran.returncode, ran.stderr
    report = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    (of,) = report["models"]
    assert ("gpu", "cpu", "bf16", "tiny", {}) == (
        *(report[name] for name in ("benchmark", "device", "dtype")),
        of["model"]["name"],
        report["left_out"],
    )
    assert (
        {"fixed", "digits"}
        == of["over_floor"].keys()
        == of["exact_over_greedy"].keys()
        == of["outlines_over_ours"].keys()
    )
    assert ["2"] == list(of["ours_per_s"])
    assert ["1 slots", "2 slots"] == list(of["rows"][0]["ours"]["tried"])
    assert of["predicted"]["pass_ms"] > 0 < of["predicted"]["kernels"]
    for found in of["warm"].values():
        assert 1 == found["reason_ms"]["n"]
        assert [0] * len(found["outlines"]) == [theirs.get("outside", 0) for theirs in found["outlines"].values()]
    page = (out / "page.md").read_text(encoding="utf-8")
    assert "**tiny**" in page
    assert "Outlines, outlines_core: 0 outside" in page


def test_what_is_out_of_time_is_left_out_and_said(kit: Path) -> None:
    packets = gpu.pickle.loads((kit / "packets.pickle").read_bytes())
    with pytest.raises(gpu.UsageError, match=r"nothing was measured: .*out of time"):
        gpu.run([lambda _scratch: kit / "tokenizer"], packets, "cpu", (1,), print, gpu.Budget(0.0))


def test_the_embedded_models_file_travels_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PART_BYTES", 40_000_000)
    assert pack.joined(tmp_path, tmp_path / "whole") is None
    pack.write_parts(tmp_path, embedded_model())
    assert 3 == len(list(tmp_path.glob("weights.*")))
    whole = pack.joined(tmp_path, tmp_path / "whole")
    assert whole is not None
    assert embedded_model().read_bytes() == whole.read_bytes()


def test_a_small_a_middling_and_a_large_shape_are_known() -> None:
    assert {EMBEDDED, "qwen2-1.5b", "llama-8b", "tiny"} == set(SHAPES)

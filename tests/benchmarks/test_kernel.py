"""The kernel's benchmark runs, beside `dir-core` or without it. Its figures are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.benchmarks import kernel
from tests.questions import asked


def test_the_kernel_benchmark_ends_with_one_json_document_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "WARM_UP", 2)
    kept = tmp_path / "kept"
    report, said = asked(kernel, "--json", "--n", "2", "--folder", str(tmp_path), "--save", str(kept))
    assert {"jit_us_p99", "verdict_us_p50", "durable_over_commit_p50", "monitors_us_p50", "rule_us"} <= report.keys()
    assert 2 == report["monitors_us"]["n"]
    assert (2, 20) == (report["durable_us"]["n"], report["jit_us"]["n"])
    assert report["predicted"].keys() == report["over_predicted"].keys() == {"jit_us", "verdict_us", "durable_us"}
    assert [20, 20, 2] == [report[f"dir_core_{name}_us"]["n"] for name in ("jit", "verdict", "decided")]
    assert f"dir-core=={report['versions']['dir-core']}\n" in Path(
        "benchmarks/peer/requirements/dir-core.txt"
    ).read_text(encoding="utf-8")
    assert "sds bench kernel --n 2" == report["command"]
    assert [] == said
    assert [kept] == list(tmp_path.iterdir())
    assert [kept / "kernel.json"] == list(kept.iterdir())
    assert report == json.loads((kept / "kernel.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("raise ImportError('no such thing')", "not installed (ImportError: no such thing)"),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
        ("raise SystemExit", "the process has ended: it printed nothing"),
    ],
)
def test_without_dir_core_the_kernel_benchmark_says_so(
    package: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "WARM_UP", 2)
    overlay = tmp_path / "dir-core" / "dir_core"
    overlay.mkdir(parents=True)
    (overlay / "__init__.py").write_text(package, encoding="utf-8")
    report, said = asked(kernel, "--n", "1", "--folder", str(tmp_path), "--overlays", str(tmp_path))
    assert f"dir-core: {why}" == report["not_asked"]
    assert not any(name.startswith("dir_core") for name in report)
    assert said.index(f"predicted, in us: {report['predicted']}") < said.index(
        f"jit_us               {report['jit_us']}"
    )

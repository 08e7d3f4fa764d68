"""Benchmarks run, say what they measured, and their last line is one JSON document. Their figures are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.benchmarks import kernel


def test_the_kernel_benchmark_ends_with_one_json_document_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, small in (("WARM_UP", 2), ("PURE_N", 20), ("DURABLE_N", 20)):
        monkeypatch.setattr(kernel, name, small)
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["kernel", "--folder", str(tmp_path), "--page", str(page)])
    kernel.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"jit_us_p99", "verdict_us_p50", "durable_over_commit_p50"} <= report.keys()
    assert f"| {report['verdict_us_p50']} |" in page.read_text(encoding="utf-8")
    assert [page] == list(tmp_path.iterdir())

"""Benchmarks run, say what they measured, and their last line is one JSON document. Their figures are not tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.benchmarks import kernel, peers
from sds.benchmarks.packets import digits_packets, fixed_packets
from sds.benchmarks.peer_process import PeerProcess
from sds.kernel.envelope import format_literal


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


def test_every_engine_gets_the_same_questions_and_the_last_line_says_how_each_fared(
    tmp_path: Path,
    tiny_path: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, only = tmp_path / "page.md", "llamacpp-grammar,outlines-llamacpp-llguidance"
    arguments = ["--n", "1", "--only", only, "--model", str(tiny_path(1)), "--page", str(page)]
    monkeypatch.setattr(peers, "WARM_UP", 0)
    monkeypatch.setattr("sys.argv", ["peers", *arguments])
    peers.main()
    said = capsys.readouterr().out.splitlines()
    report = json.loads(said[-1])
    assert {"ours_ms_p50", "ours_digits_ms_p50", "speedup_over_fastest", "speedup_digits"} <= report.keys()
    assert only.split(",") == [found["name"] for found in report["peers"]]
    for found in (report["ours"], *report["peers"]):
        assert (0, 0) == (found["violations"], found["errors"])
        assert 1 == sum(found["decided"].values()) == sum(found["digits_decided"].values())
    fastest = min(found["ms_p50"] for found in report["peers"])
    assert round(fastest / report["ours_ms_p50"], 2) == report["speedup_over_fastest"]
    assert ["fixed", "digits"] == [line.partition(":")[0] for line in said if "prompt tokens to read" in line]
    assert f"| {report['ours_ms_p50']} |" in page.read_text(encoding="utf-8")


def test_what_a_peer_writes_outside_the_envelope_is_counted_and_what_fails_is_an_error(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WARM_UP", 0)
    kinds = ("beyond", "elsewhere", "raising", "dying", "missing")
    liars = [peers.Contender(kind, "tests.own_peers", (kind,)) for kind in kinds]
    said: list[str] = []
    report = peers.run(tmp_path, tiny_path(1), liars, 1, threads=1, say=said.append)
    counted = {found["name"]: (found["violations"], found["errors"]) for found in report["peers"]}
    assert {"beyond": (2, 0), "elsewhere": (2, 0), "raising": (0, 2), "dying": (0, 2), "missing": (0, 0)} == counted
    notes = {found["name"]: found["notes"] for found in report["peers"]}
    assert "ValueError: no token is left" == notes["raising"]
    assert "it has ended: out of luck" == notes["dying"]
    assert "missing: not installed (ImportError: no module named anything)" == said[0]
    assert {} == report["peers"][0]["decided"]


def test_the_packets_of_the_benchmark_are_of_the_two_kinds_it_says(tmp_path: Path) -> None:
    fixed, digits = fixed_packets(tmp_path, 5), digits_packets(tmp_path, 5)
    assert {()} == {kind.params for packet in fixed for kind in packet.envelope.kinds}
    amounts = [packet.envelope.kind("REFUND_TICKET").params[0][1] for packet in digits]  # type: ignore[union-attr]
    assert all(1000 <= amount.lo <= amount.hi <= 9999 for amount in amounts)
    assert 5 == len(set(amounts))
    for packet, amount in zip(digits, amounts, strict=True):
        told = f"REFUND_TICKET (amount {format_literal(amount.lo, 2)} to {format_literal(amount.hi, 2)})"
        assert any(told in text for text in packet.texts)
        assert not any("COMPENSATE (" in text for text in packet.texts)


def test_a_peer_that_does_not_answer_in_time_is_ended_and_its_next_answers_are_errors(tmp_path: Path) -> None:
    module, arguments = "tests.own_peers", ["model", "1", "sleeping"]
    peer = PeerProcess(module, arguments, log=tmp_path / "log", overlay=None, timeout_s=60)
    late = peer.ask({}, timeout_s=0.2)
    assert {"error": "no answer within 0.2 s"} == late == peer.ask({}, timeout_s=60)
    peer.close()

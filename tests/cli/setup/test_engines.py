"""Another engine on the command line: the same run, and the record says who decided and what was not measured."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Shell
from tests.engines.servers import LlamaServer, free_port
from tests.hostile import Vocabulary, tiny_checkpoint


@pytest.fixture(scope="module")
def tiny_model(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny.gguf", vocabulary, 1)


def test_a_run_under_outlines_keeps_every_promise_and_the_audit_says_what_is_unavailable(
    shell: Shell, report: Any, tiny_model: Path
) -> None:
    options = ("--engine", "outlines", "--backend", "llguidance", "--model", str(tiny_model))
    done = shell("run", "refund", "--limit", "4", "--parallel", "2", "--json", *options)
    assert "Outlines decides one case at a time: --parallel has no effect\n" in done.stderr
    found = json.loads(done.stdout)
    assert found["model"].startswith("outlines/tiny.gguf@")
    assert (0, 0, []) == (found["out_of_envelope"], found["double_payouts"], found["record_faults"])
    flows = json.loads(shell.ok("flows", "--limit", "4", "--json"))
    shown = [shell.ok("audit", flow["dfid"]) for flow in flows]
    asked = [text for text in shown if "model: outlines/tiny.gguf@" in text]
    assert asked
    assert all("unavailable with this engine" in text for text in asked)


def test_several_claims_are_decided_at_once_and_the_record_says_how(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_THREADS", "2")  # an engine each
    alone = Shell(tmp_path)
    options = ("--parallel", "3", "--mode", "exact", "--model", str(tiny_model))
    found = alone.json("run", "refund", "--limit", "9", "--json", *options)
    assert (9, 0, 0, []) == tuple(
        found[name] for name in ("decisions", "out_of_envelope", "double_payouts", "record_faults")
    )
    with closing(sqlite3.connect(tmp_path / "refund" / "decisions.db")) as record:
        bodies = [json.loads(body) for (body,) in record.execute("SELECT body FROM ledger WHERE kind = 'DECIDED'")]
    facts = [body["decoding"] for body in bodies if "decoding" in body]
    assert {("exact", 1, 1)} == {(fact["mode"], fact["slots"], fact["threads"]) for fact in facts}


def test_a_run_through_openvino_is_recorded_as_one_and_replayed_as_one(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
    alone = Shell(tmp_path)
    options = ("--library", "openvino", "--dtype", "fp32", "--parallel", "2", "--model", str(tiny_model))
    found = alone.json("run", "refund", "--limit", "3", "--json", *options)
    assert (3, 0, 0, []) == tuple(
        found[name] for name in ("decisions", "out_of_envelope", "double_payouts", "record_faults")
    )
    with closing(sqlite3.connect(tmp_path / "refund" / "decisions.db")) as record:
        rows = record.execute("SELECT dfid, body FROM ledger WHERE kind = 'DECIDED'").fetchall()
    asked = {dfid: facts for dfid, body in rows if (facts := json.loads(body).get("decoding"))}
    assert {("openvino", "fp32", 2)} == {
        (facts["library"].split()[0], facts["dtype"], facts["slots"]) for facts in asked.values()
    }
    assert alone.ok("replay", min(asked), "--model", str(tiny_model)).startswith("identical: ")


@pytest.mark.parametrize(
    ("options", "said", "mend"),
    [
        (
            ("--device", "cuda"),
            "`device` is for the libraries llamacpp and transformers",
            "use --library transformers or llamacpp",
        ),
        (
            ("--dtype", "fp16"),
            "OpenVINO computes in fp32, bf16, int8 or int8-bf16 here",
            "choose another --dtype or another --library",
        ),
        (("--engine", "outlines"), "Outlines drives llama.cpp and transformers, not OpenVINO", "leave out --library"),
        (("--model", "docs"), "OpenVINO runs GGUF files, not folders", "leave out --library"),
    ],
)
def test_what_openvino_cannot_do_is_refused_with_its_mend(
    shell: Shell, options: tuple[str, str], said: str, mend: str
) -> None:
    done = shell("doctor", "--library", "openvino", *options)
    assert f"FAIL  model and mask: {said} ({mend})" in done.stdout


def test_a_chain_decides_through_its_server_and_through_the_local_model_when_that_is_down(
    shell: Shell, report: Any, tiny_model: Path, tmp_path: Path
) -> None:
    server = LlamaServer(tiny_model, tmp_path / "server.log")
    file = tmp_path / "engines.yaml"
    file.write_text(
        "engines:\n"
        f'  - {{name: box, kind: llama-server, url: "{server.url}", model: tiny}}\n'
        f"  - {{name: here, kind: native, model: {tiny_model}}}\n"
    )
    server.start()
    up = shell("doctor", "--engines", str(file))
    server.kill()
    down = shell("doctor", "--engines", str(file))
    assert "model and mask: box/tiny > tiny.gguf@" in up.stdout
    assert "model and mask: box (down) > tiny.gguf@" in down.stdout
    assert down.stderr.startswith("engine `box` is down, so the next one is used: box: the server cannot be reached")
    assert 0 == down.returncode


def test_one_event_is_decided_by_a_chain(shell: Shell, report: Any, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(
        "engines:\n"
        f'  - {{name: box, kind: llama-server, url: "http://127.0.0.1:{free_port()}/v1", model: tiny}}\n'
        f"  - {{name: here, kind: native, model: {tiny_model}}}\n"
    )
    event = shell.ok("events", "refund", "--limit", "1")
    answer = json.loads(shell.ok("decide", "refund", "--event", "-", "--engines", str(file), stdin=event))
    assert answer["state"] in ("CLOSED", "ESCALATED")

"""The command line, as a user meets it: real model, real flights, real rail, and every mistake in plain words."""

from __future__ import annotations

import json
import re
import sqlite3
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sds.host.paths import decisions_path
from tests.cli.conftest import Shell
from tests.scale import scale


def test_a_run_decides_reports_and_breaks_no_promise(report: Any) -> None:
    assert 8 == report["decisions"] == sum(report["outcomes"].values())
    assert 0 == report["out_of_envelope"]
    assert 0 == report["double_payouts"]
    assert [] == report["record_faults"]
    assert 0.0 <= report["agreement"] <= 1.0
    assert {"p50", "p95", "p99"} <= report["latency_ms"].keys()


def test_the_table_says_what_reads_and_how_often_it_was_right(shell: Shell, report: Any) -> None:
    shown = shell.ok("run", "refund", "--limit", "1")
    assert "decided by policy: cause by encoder@" in shown
    assert "agreement with the written adjudication rule: " in shown
    for row in ("compensated", "refunded", "vouchers", "denied", "escalated", "aborted on drift"):
        assert row in shown


def test_under_drift_nothing_is_paid_on_a_moved_ticket(shell: Shell, report: Any) -> None:
    moved = shell.json("run", "refund", "--limit", str(scale(6, 200)), "--chaos", "drift", "--json")
    assert 0 < moved["moved_tickets_that_would_have_paid"] <= moved["moved_tickets"]
    assert 0 == moved["moved_tickets_paid"]
    assert 0 < moved["unmoved_paid"]
    assert 0 == moved["double_payouts"]


def test_one_event_from_queue_to_audit(shell: Shell, report: Any, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text(shell.ok("events", "refund", "--limit", "1"))
    envelope = shell.json("envelope", "refund", "--event", str(event), "--json")
    assert "ESCALATE" in [kind["kind"] for kind in envelope["kinds"]]
    pattern = shell.ok("grammar", "refund", "--event", str(event), "--format", "regex").strip()
    schema = json.loads(shell.ok("grammar", "refund", "--event", str(event), "--format", "json-schema"))
    answer = shell.json("decide", "refund", "--event", str(event))
    record = shell.json("audit", answer["dfid"], "--json")
    said = record["policy_proposals"]["proposal"]
    jsonschema.validate({**json.loads(said), "context_ref": _reference(schema)}, schema)
    assert re.fullmatch(re.sub("[0-9a-f]{64}", "[0-9a-f]{64}", pattern), said)
    assert answer == shell.json("decide", "refund", "--event", str(event))
    shown = shell.ok("audit", answer["dfid"])
    for part in ("trigger", "snapshot", "prompt", "proposal", "verdict", "ledger", answer["dfid"]):
        assert part in shown


def test_one_language_is_printed_in_every_form(shell: Shell, report: Any) -> None:
    event = shell.ok("events", "refund", "--limit", "1")
    forms = {
        form: re.sub("[0-9a-f]{64}", "", shell.ok("grammar", "refund", "--event", "-", "--format", form, stdin=event))
        for form in ("regex", "lark", "gbnf", "json-schema")
    }
    assert forms["regex"] == re.sub("[0-9a-f]{64}", "", shell.ok("grammar", "refund", "--event", "-", stdin=event))
    assert f"start: /{forms['regex'].strip()}/" == forms["lark"].strip()
    assert forms["gbnf"].startswith('root ::= "{\\"action\\":\\"" (')
    for kind in json.loads(forms["json-schema"])["anyOf"]:
        assert kind["properties"]["action"]["const"] in forms["gbnf"]


def _reference(schema: Any) -> Any:
    """The snapshot is taken anew for each preview, so its hash differs; everything else must hold."""
    return re.search(r"[0-9a-f]{64}", json.dumps(schema))[0]  # type: ignore[index]


def test_an_event_may_come_from_standard_input(shell: Shell, report: Any) -> None:
    event = shell.ok("events", "refund", "--limit", "1")
    answer = shell.json("decide", "refund", "--event", "-", stdin=event)
    assert json.loads(event)["claim_id"] == answer["event_id"]
    again = ("decide", "refund", "--event", "-", "--model", "no-such-model.gguf")
    assert answer == shell.json(*again, stdin=event), "a stored answer needs no model"
    other = shell(*again, stdin=event.replace('"claim_text": "', '"claim_text": "x'))
    assert (2, f"error: event `{answer['event_id']}` was seen with another body") == (
        other.returncode,
        other.stderr.splitlines()[0],
    )


def test_the_ledger_verifies_and_a_kept_head_shows_truncation(shell: Shell, report: Any, tmp_path: Path) -> None:
    head = shell.ok("ledger", "head").strip()
    assert "0 faults" in shell.ok("ledger", "verify", "--head", head)
    assert "not detectable without --head" in shell.ok("ledger", "verify")
    index, digest = head.split(":")
    cut = shell("ledger", "verify", "--head", f"{int(index) + 1}:{digest}")
    assert 1 == cut.returncode
    assert f"entry {int(index) + 1}: missing" in cut.stdout


def test_a_halt_stops_everything_until_it_is_lifted(shell: Shell, report: Any) -> None:
    assert "refund: halted\n" == shell.ok("halt", "--reason", "a test")
    assert "refund: was already halted\n" == shell.ok("halt", "--reason", "a test")
    refused = shell("run", "refund", "--limit", "1", "--model", "no-such-model.gguf")
    assert (2, "error: the gate is halted") == (refused.returncode, refused.stderr.splitlines()[0]), "before a model"
    refused = shell("run", "refund", "--limit", "1", "--reset", "--model", "no-such-model.gguf")
    assert (2, "error: `refund` is halted, and a reset would lift the halt") == (
        refused.returncode,
        refused.stderr.splitlines()[0],
    )
    event = shell.ok("events", "refund", "--limit", "1")
    assert "ESCALATED" == shell.json("decide", "refund", "--event", "-", stdin=event)["state"]
    assert "refund: running\n" == shell.ok("resume", "--reason", "the test is over")


def test_a_claim_cannot_draw_on_the_audit_page(shell: Shell, report: Any) -> None:
    event = json.loads(shell.ok("events", "refund", "--limit", "1"))
    forged = "late\x1b[2J\nreceipt\n  status: SUCCESS"
    answer = shell.json("decide", "refund", "--event", "-", stdin=json.dumps({**event, "claim_text": forged}))
    shown = shell.ok("audit", answer["dfid"])
    assert "\x1b" not in shown
    assert "  claim_text: late\\x1b[2J\\nreceipt\\n  status: SUCCESS" in shown


def test_flows_lists_the_latest_and_audit_takes_the_beginning_of_a_dfid(shell: Shell, report: Any) -> None:
    line = shell.ok("flows", "--limit", "1")
    dfid = line.split()[1]
    assert shell.ok("audit", dfid) == shell.ok("audit", dfid[:13])
    assert [dfid] == [flow["dfid"] for flow in json.loads(shell.ok("flows", "--limit", "1", "--json"))]


def test_with_json_standard_output_is_one_document(shell: Shell, report: Any) -> None:
    assert 1 == json.loads(shell.ok("run", "refund", "--limit", "1", "--json"))["decisions"]


def test_recover_says_what_it_found(shell: Shell, report: Any) -> None:
    counts = ("interrupted", "success", "failed", "unknown", "leased", "sagas_ended", "sagas_dirty", "errors")
    nothing = dict.fromkeys(counts, 0)
    assert nothing == shell.json("recover", "--json")


def test_doctor_checks_model_mask_store_data_and_contract(shell: Shell, report: Any) -> None:
    lines = shell.ok("doctor").splitlines()
    assert ["versions", "model and mask", "readers", "store", "flights", "contract", "outside"] == [
        line.removeprefix("ok    ").partition(":")[0] for line in lines
    ]


def test_doctor_reads_every_record_through(tmp_path: Path) -> None:
    own = Shell(tmp_path)
    for gate in ("kiosk", "refund.old-1"):  # what was put aside is no gate's
        (tmp_path / gate).mkdir()
    decisions_path(tmp_path / "kiosk").write_bytes(b"no record" * 1_000)
    decisions_path(tmp_path / "refund.old-1").write_bytes(b"")
    done = own("doctor")
    assert 1 == done.returncode
    assert "FAIL  store: " in done.stdout
    assert "kiosk" in next(line for line in done.stdout.splitlines() if line.startswith("FAIL  store"))
    assert "gates with a record there (`--gate`): kiosk\n" in own("flows", "--gate", "nosuch").stderr


def test_doctor_says_when_the_refund_contract_could_not_be_put_in_force(tmp_path: Path) -> None:
    own, later = Shell(tmp_path / "home"), tmp_path / "later.yaml"
    ours = files("sds.gates.refund").joinpath("contract.yaml").read_text()
    later.write_text(re.sub(r"(?m)^version: .*", "version: 9.0.0", ours))
    own.ok("contracts", "register", str(later), "--reason", "a newer program", "--acknowledge")
    done = own("doctor", "--model", "README.md")
    assert "\nFAIL  contract: refund 1.6.0 could not be put in force: " in done.stdout
    assert "9.0.0" in done.stdout


def test_logs_are_json_with_dfid_and_without_personal_data(shell: Shell, report: Any) -> None:
    queue = [json.loads(line) for line in (shell.home / "refund" / "claims.jsonl").read_text().splitlines()[:40]]
    text = (shell.home / "refund" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"event", "timestamp", "level"} <= line.keys() for line in lines)
    of_no_flow = ("engine.", "reconcile.")
    assert all("dfid" in line or line["event"].startswith(of_no_flow) for line in lines)
    assert not [claim for claim in queue if claim["claim_text"] in text]
    assert "cust-" not in text


MISTAKES = [
    (("run", "loans"), 2, "error: there is no gate `loans`"),
    (("run", "refund", "--limit", "0"), 2, "greater than or equal to 1"),
    (("run", "refund", "--limit", "3", "--chaos", "fire"), 2, "Invalid value for '--chaos'"),
    (("run", "refund", "--limit", "1", "--model", "nowhere.gguf"), 2, "error: `nowhere.gguf`"),
    (("run", "refund", "--limit", "1", "--model", "README.md"), 2, "error: `README.md` is not a GGUF file"),
    (("contracts", "check", "sds/gates/refund/contract.yaml", "--model", "nope"), 2, "error: `nope` cannot be read"),
    (("decide", "refund"), 2, "Missing option '--event'"),
    (("decide", "refund", "--event", "nowhere.json"), 2, "error: `nowhere.json` cannot be read"),
    (("decide", "refund", "--event", "README.md"), 2, "error: the event is not JSON"),
    (("decide", "refund", "--event", "README.md"), 2, "mend:  sds events refund --limit 1 > event.json"),
    (("events", "loans"), 2, "error: there is no gate `loans`"),
    (("envelope", "refund", "--event", "Makefile"), 2, "error: the event is not JSON"),
    (("grammar", "refund", "--event", "Makefile", "--format", "xml"), 2, "error: there is no format `xml`"),
    (("audit", "no-such-flow"), 2, "error: there is no flow `no-such-flow`"),
    (("audit", "x", "--gate", "../etc"), 2, "error: there is no gate at `../etc`: no such file or folder"),
    (("ledger", "verify", "--head", "nonsense"), 2, "error: `nonsense` is not a head"),
    (("ledger", "burn"), 2, "No such command 'burn'"),
    (("agents", "suspend", "nobody", "--reason", "r"), 2, "error: there is no agent `nobody`"),
    (("agents", "reactivate", "refund-agent", "--reason", "r"), 2, "error: agent `refund-agent` is already ACTIVE"),
    (("flows", "--gate", "nowhere"), 2, "error: there is no record at"),
    (("agents", "list", "--gate", "nowhere"), 2, "error: there is no record at"),
    (("halt",), 2, "Missing option '--reason'"),
    (("halt", "--reason", " "), 2, "error: a reason is needed"),
    (("halt", "--reason", "\u200b\u3164"), 2, "error: a reason is needed"),
    (("recover", "--reason", " "), 2, "error: a reason is needed"),
    (("recover", "--gate", "loans"), 2, "error: there is no gate `loans`"),
    (("doctor", "--model", "nowhere.gguf"), 1, "FAIL  model and mask: `nowhere.gguf`"),
    (("run", "refund", "--engine", "gpt"), 2, "Invalid value for '--engine'"),
    (
        ("run", "refund", "--engine", "outlines", "--backend", "xgrammar", "--library", "llamacpp"),
        2,
        "error: xgrammar runs only",
    ),
    (("run", "refund", "--engine", "outlines", "--backend", "xgrammar"), 2, "mend:  use --library transformers"),
    (("run", "refund", "--limit", "1", "--library", "llamacpp", "--model", "tests"), 2, "mend:  leave out --library"),
    (
        ("contracts", "check", "sds/gates/refund/contract.yaml", "--model", "tests"),
        2,
        "mend:  name a GGUF file: only the library transformers runs folders",
    ),
    (("run", "refund", "--backend", "llguidance"), 2, "error: `native` has no use for `backend`"),
    (("run", "refund", "--engine", "outlines", "--mode", "exact"), 2, "mend:  leave out --mode"),
    (("run", "refund", "--dtype", "bf16"), 2, "mend:  add --library NAME"),
    (
        ("run", "refund", "--dtype", "bf16", "--library", "llamacpp"),
        2,
        "mend:  choose another --dtype or another --library",
    ),
    (("run", "refund", "--device", "cuda:99"), 1, "error: llama.cpp finds no GPU 99 here"),
    (("run", "refund", "--engines", "nowhere.yaml"), 2, "error: `nowhere.yaml` cannot be read"),
    (
        ("run", "refund", "--engines", "x.yaml", "--engine", "native"),
        2,
        "error: --engines and --engine exclude each other",
    ),
    (("run", "refund", "--limit", "1", "--engines", "Makefile"), 2, "error: Makefile:"),
    (("decide", "refund", "--event", "README.md", "--engines", "nowhere.yaml"), 2, "error: the event is not JSON"),
    (("doctor", "--engine", "outlines", "--model", "nowhere.gguf"), 1, "FAIL  model and mask: `nowhere.gguf`"),
    (("run", "refund", "--model", "tests", "--device", "tpu"), 2, "error: `tpu` is not cpu, cuda or cuda:1"),
    (("run", "refund", "--chaos", "fail-second"), 2, "mend:  add --saga REFUND_WITH_VOUCHER, or use --chaos drift"),
    (("audit", ""), 2, "error: the value after `audit` is empty"),
    (("escalations", "resolve", "", "--abort", "--reason", "typo"), 2, "error: the value after `resolve` is empty"),
    (("audit", " "), 2, "error: the dfid is empty"),
    (("models", "check", "README.md", "--contract", ""), 2, "error: the value after `--contract` is empty"),
    (
        ("run", "refund", "--dtype", "fp32"),
        2,
        "error: `dtype` is for the libraries transformers, openvino and integer: name one of them, too",
    ),
    (("bench", "kernel", "--save", "nowhere/kept"), 2, "error: `nowhere/kept` cannot be written"),
    (("bench", "kernel", "--n", "0"), 2, "error: argument --n: `0` is not a number from 1 to"),
    (
        ("bench", "kernel", "--model", "m"),
        2,
        "error: this question does not take `--model m`: it takes --folder, --json",
    ),
    (("bench", "hotpath", "--model", "nowhere.gguf"), 2, "error: argument --model: `nowhere.gguf` cannot be read"),
    (("bench", "peers", "--only", "nobody"), 2, "error: argument --only: there is no `nobody`"),
    (("bench", "gpu", "--device", "cuda:63"), 2, "error: no CUDA device"),
    (("bench", "report", "--results", "nowhere"), 2, "error: `nowhere` is not a folder"),
    (("bench", "everything"), 2, "error: there is no benchmark `everything`"),
    (("fly",), 2, "No such command 'fly'"),
]


@pytest.mark.parametrize(("args", "code", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_answered_in_one_line_without_a_traceback(
    shell: Shell, report: Any, args: tuple[str, ...], code: int, message: str
) -> None:
    done = shell(*args)
    assert code == done.returncode, done.stderr
    assert message in done.stderr + done.stdout
    assert code == 1 or ["error: ", "mend:  "] == [line[:7] for line in done.stderr.splitlines()[-2:]]
    assert "Traceback" not in done.stderr + done.stdout


def test_a_command_on_a_home_without_a_record_asks_whether_it_is_the_right_one(shell: Shell, tmp_path: Path) -> None:
    for args in (("audit", "x"), ("ledger", "verify"), ("ledger", "head"), ("halt", "--reason", "r"), ("recover",)):
        done = shell(*args, home=tmp_path)
        assert 2 == done.returncode
        assert f"mend:  check SDS_HOME: the home in use is `{tmp_path}`" in done.stderr


def test_a_tampered_record_fails_verification(shell: Shell, report: Any, tmp_path: Path) -> None:
    copy = tmp_path / "refund"
    copy.mkdir()
    for file in (shell.home / "refund").glob("decisions.db*"):
        (copy / file.name).write_bytes(file.read_bytes())
    with sqlite3.connect(copy / "decisions.db") as db:
        db.execute(
            "UPDATE policy_proposals SET confidence = 0.125 WHERE dfid = (SELECT min(dfid) FROM policy_proposals)"
        )
    done = shell("ledger", "verify", home=tmp_path)
    assert 1 == done.returncode
    assert "table policy_proposals" in done.stdout

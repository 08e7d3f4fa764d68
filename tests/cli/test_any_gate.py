"""Every command that opens a gate works on one that is named by its path, as an argument and as `--gate`."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from sds.cli.app import app
from sds.cli.decisions import decide, run
from sds.cli.hints import at_gate
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket
from tests.cli.conftest import Cli
from tests.gates.own import GATE, written
from tests.kernel.durable import proposal
from tests.proposers import Greedy, Says
from tests.stores.planned import Planned


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `sds` with a gate `toll` at `toll/gate.py`, and a proposer that waives what it may."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "toll")
    for module in (run, decide):
        monkeypatch.setattr(module, "opened_engine", lambda *_, **__: nullcontext(Greedy("WAIVE")))
    return Cli(capsys, monkeypatch, tmp_path / "home" / "toll")


def event(number: int, path: Path = Path("event.json")) -> str:
    path.write_text(json.dumps({"trip_id": f"T-{number}", "car_id": "CAR-1", "text": "Please."}), encoding="utf-8")
    return str(path)


def test_a_run_works_through_the_queue_and_compares_with_the_statement(cli: Cli) -> None:
    assert "T-0" == json.loads(cli.ok("events", "./toll").splitlines()[0])["trip_id"]
    report = json.loads(cli.ok("run", "./toll", "--limit", "4", "--json").splitlines()[-1])
    assert {"escalated": 1, "waive": 1, "deny": 2} == report["outcomes"]
    assert (500, 0, None, []) == tuple(
        report[n] for n in ("paid_minor", "double_payouts", "agreement", "record_faults")
    )
    said = cli.ok("run", "--gate", "toll/gate.py", "--limit", "1")
    assert "the executor's statement and the record agree, order by order" in said
    assert "claim" not in said
    assert ["T-5"] == [json.loads(line)["trip_id"] for line in cli.ok("events", "--gate", "./toll").splitlines()]
    assert 1 == json.loads(cli.ok("run", "./toll", "--json").splitlines()[-1])["decisions"], "the limit is a maximum"
    assert (2, "error: the queue has no event left") == beginning(cli("run", "./toll", "--limit", "1"))
    assert (0, "", "no events: the whole queue is decided\n") == cli("events", "./toll")


def beginning(ended: tuple[int, str, str]) -> tuple[int, str]:
    return ended[0], ended[2].splitlines()[0]


def test_one_event_is_looked_at_decided_and_settled_by_a_human(cli: Cli) -> None:
    named = event(1)
    assert "WAIVE" in cli.ok("envelope", "./toll", "--event", named)
    assert "WAIVE" in cli.ok("grammar", "--gate", "./toll", "--event", named)
    answer = json.loads(cli.ok("decide", "./toll", "--event", named))
    assert ("WAIVE", {"amount": 500}, "SUCCESS") == (answer["action"], answer["params"], answer["execution"])
    assert "DENY" == json.loads(cli.ok("decide", "--gate", "./toll", "--event", event(9)))["action"]
    assert "errors: 0" in cli.ok("recover", "--gate", "./toll")
    assert "0 differences" in cli.ok("reconcile", "./toll")
    for command in (("flows",), ("audit", answer["dfid"]), ("ledger", "verify"), ("agents", "list"), ("keys", "show")):
        assert cli.ok(*command, "--gate", "./toll") == cli.ok(*command, "--gate", "toll")


def test_what_is_left_undecided_ends_with_a_failure_however_it_was_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count()

    def busy(packet: DecisionPacket) -> bytes:
        if next(asked) != 3:
            raise QueueTimeoutError("nothing was free")
        return proposal("DENY", "NO_REASON")(packet)

    for module in (run, decide):
        monkeypatch.setattr(module, "opened_engine", lambda *_, **__: nullcontext(Says(busy)))
    code, out, err = cli("decide", "./toll", "--event", event(1))
    first = json.loads(out)
    assert (1, True) == (code, first["retryable"])
    said = ["error: event `T-1` was not decided: DEADLINE_EXCEEDED", "mend:  decide the same event again later"]
    assert said == err.splitlines()[:2]
    code, out, err = cli("retry", first["dfid"], "--gate", "./toll")
    second = json.loads(out)["dfid"]
    assert (1, "error: event `T-1` was not decided: DEADLINE_EXCEEDED") == beginning((code, out, err))
    third = json.loads(cli("decide", "./toll", "--event", event(2))[1])["dfid"]
    code, out, err = cli("retry", second, third, "--gate", "./toll")
    assert [False, True] == [json.loads(line)["retryable"] for line in out.splitlines()]
    assert (1, "error: 1 of 2 were not done") == beginning((code, out, err))
    assert "mend:  sds flows --undecided --gate ./toll lists what waits" == err.splitlines()[1]
    asked = count(2)
    ended = cli("run", "./toll", "--limit", "3")
    assert (1, "error: 2 of 3 events were not decided: they wait") == beginning(ended)


def test_a_human_is_told_what_to_type_for_a_gate_of_this_path(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "opened_engine", lambda *_, **__: nullcontext(Greedy("ESCALATE")))
    answer = json.loads(cli.ok("decide", "./toll", "--event", event(1)))
    assert answer["dfid"] in cli.ok("escalations", "list", "--gate", "./toll")
    shown = json.loads(cli.ok("escalations", "show", answer["dfid"], "--gate", "./toll", "--json"))
    abort = shown["commands"][-1].split(" --reason")[0].split()
    assert ["sds", "escalations", "resolve", answer["dfid"], "--gate", "./toll", "--abort"] == abort
    assert "ABORT" in cli.ok(*abort[1:], "--reason", "withdrawn")


@pytest.mark.parametrize(
    ("typed", "mend"),
    [
        (("retry", "none"), "sds flows --undecided --gate ./toll"),
        (("replay", "none"), "sds flows --gate ./toll"),
        (("escalations", "show", "none"), "sds escalations list --gate ./toll"),
        (("agents", "show", "none"), "sds agents list --gate ./toll"),
        (("agents", "revoke", "toll-agent", "9.9.9", "--reason", "x"), "sds agents show toll-agent --gate ./toll"),
        (("erase", "--event", "none", "--reason", "x"), "sds flows --gate ./toll"),
        (("audit", " "), "sds flows --gate ./toll lists them"),
        (("keys", "rotate", "--lost", "--reason", "x"), 'sds keys rotate --gate ./toll --reason "..."'),
        (("record", "move", "--to", "sqlite", "--reason", "x"), 'sds halt --gate ./toll --reason "..."'),
        (("reconcile", "--adopt"), 'sds reconcile ./toll --adopt --reason "..."'),
        (("decide", "--event", "-"), "sds events ./toll --limit 1 > event.json; sds decide ./toll --event event.json"),
    ],
)
def test_a_hint_that_is_a_command_works_on_the_gate_that_was_typed(cli: Cli, typed: tuple[str, ...], mend: str) -> None:
    cli.ok("run", "./toll", "--limit", "1")
    for option in (("--gate", "./toll"), ("--gate=./toll",)):
        code, _, err = cli(*typed, *option)
        assert (2, f"mend:  {mend}") == (code, err.splitlines()[1])


@pytest.mark.parametrize(
    "path", ["../my tolls/toll", "../my tolls/toll/", "../my tolls/../my tolls/toll/gate.py", None]
)
def test_hints_work_as_they_are_printed_for_a_gate_at_any_path(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    folder = written(Path("my tolls/toll")).parent.resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    gate = path or str(folder)
    cli.ok("run", gate, "--limit", "1")
    cli.ok("agents", "suspend", "toll-agent", "--gate", gate, "--reason", "a test")
    for typed in (
        ("run", gate),
        ("escalations", "show", "none", "--gate", gate),
        ("retry", "none", "--gate", gate),
        ("reconcile", gate, "--adopt"),
        ("keys", "rotate", "--lost", "--reason", "x", "--gate", gate),
        ("audit", "none", "--gate", gate),
    ):
        code, _, err = cli(*typed)
        assert (2, "mend:  sds ") == (code, err.splitlines()[1][:11]), err
        cli.ok(*shlex.split(err.splitlines()[1])[2:])
    backup = str(cli.folder.parent / "monday")
    cli.ok("backup", "--gate", gate, "--to", backup)
    for line in cli.ok("restore", "--gate", gate, "--from", backup).splitlines():
        if line.startswith("  sds "):
            cli.ok(*shlex.split(line, comments=True)[1:])


def test_a_hint_of_the_kernel_names_the_gate_by_its_path(cli: Cli) -> None:
    cli.ok("run", "./toll", "--limit", "1")
    for hint, mend in (
        ('sds reconcile toll --adopt --reason "..."', 'sds reconcile ./toll --adopt --reason "..."'),
        (
            "run `sds ledger verify`, and restore a backup",
            "run `sds ledger verify --gate ./toll`, and restore a backup",
        ),
        ("look again: sds escalations show 1", "look again: sds escalations show --gate ./toll 1"),
        ("sds agents show x --gate ./toll", "sds agents show x --gate ./toll"),
        ("sds models list", "sds models list"),
        ("name a folder that sds backup made", "name a folder that sds backup made"),
        ("sds run --help", "sds run --help"),
    ):
        assert mend == at_gate(hint, app, ["escalations", "resolve", "1", "--override", "--gate", "./toll"])
    assert "sds keys rotate --gate refund" == at_gate("sds keys rotate --gate GATE", app, ["keys", "show"])
    assert "sds audit 1" == at_gate("sds audit 1", app, ["audit", "1", "--gate", "refund"])


def test_a_decided_event_whose_key_is_lost_is_not_called_another(cli: Cli) -> None:
    """The hint for another body is to send it under an id of its own: it would be paid once more."""
    asked = ("decide", "./toll", "--event", event(0))
    dfid = json.loads(cli.ok(*asked))["dfid"]
    kept = (cli.folder / "kernel.key").rename("kept.key")
    lost = "error: the texts of this record are sealed, and the kernel's key is not here\nmend:  put `kernel.key` back "
    code, out, err = cli(*asked)
    assert (1, "", True) == (code, out, err.startswith(lost)), err
    assert "text: [sealed]" in cli.ok("escalations", "show", dfid, "--gate", "./toll"), "reading goes on"
    assert "ESCALATE" in cli.ok("envelope", "./toll", "--event", event(2, Path("next.json")))
    kept.rename(cli.folder / "kernel.key")
    assert dfid == json.loads(cli.ok(*asked))["dfid"]


@pytest.mark.parametrize(
    ("typed", "mend"),
    [
        ("flows refund --limit 5", "sds flows --gate refund --limit 5"),
        ("audit refund 550e8400", "sds audit --gate refund 550e8400"),
        ("agents show x ./toll --json", "sds agents show x --gate ./toll --json"),
        ("halt toll --reason 'a b'", "sds halt --gate toll --reason 'a b'"),
        ("flows nowhere", "sds flows --help"),
        ("flows refund fraud", "sds flows --help"),
        ("flows refund --gate fraud x", "sds flows --help"),
        ("halt --reason refund x", "sds halt --help"),
        ("models list refund", "sds models list --help"),
        ("decide refund x --event event.json", "sds decide --help"),
    ],
)
def test_a_gate_that_was_typed_in_a_wrong_place_is_put_into_the_right_one(cli: Cli, typed: str, mend: str) -> None:
    cli.ok("run", "./toll", "--limit", "1")
    code, out, err = cli(*shlex.split(typed))
    assert (2, "") == (code, out)
    assert [mend] == re.findall(r"\Aerror: Got unexpected extra argument.*\nmend:  (.*)\n\Z", err)


def test_a_halt_takes_the_name_and_runs_no_code_of_the_gate(cli: Cli) -> None:
    cli.ok("run", "./toll", "--limit", "1")
    written(Path("toll"), "raise SystemExit(3)")
    assert "toll: halted\n" == cli.ok("halt", "--gate", "toll", "--reason", "a test")
    assert 1 == len(cli.ok("flows", "--gate", "toll").splitlines())
    assert (0, "", "no flows\n") == cli("flows", "--gate", "toll", "--state", "CREATED")
    assert (2, "error: `toll` is a gate of your own, and its definition is not found by its name") == beginning(
        cli("recover", "--gate", "toll")
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run",), "Missing argument 'GATE'"),
        (("run", "refund", "--gate", "./toll"), "GATE and --gate exclude each other"),
        (("run", "./nowhere"), "there is no gate at `nowhere`: no such file or folder"),
        (("run", "."), "there is no gate at `.`: it holds no gate.py"),
        (("run", "./toll", "--chaos", "drift"), "gate `toll` has no chaos `drift`"),
        (("run", "./toll", "--saga", "NONE"), "there is no saga `NONE`"),
        (("events", "./quiet"), "gate `toll` has no queue of events"),
        (("flows", "--gate", "./toll"), "there is no record at"),
    ],
)
def test_a_mistake_is_answered_in_one_line(cli: Cli, args: tuple[str, ...], message: str) -> None:
    written(Path("quiet"), GATE.replace(", events=events", ""))
    code, _, said = cli(*args)
    assert (2, True, 2) == (code, message in said, len(said.splitlines())), said


class Watched(Planned):
    plans: list[str] = []  # noqa: RUF012  of all connections together


@pytest.mark.parametrize("state", ["ACTIVE", "EXECUTING", "ESCALATED"])
def test_a_flow_that_is_named_and_what_is_still_to_be_done_are_found_by_an_index(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    dfid = json.loads(cli.ok("decide", "./toll", "--event", event(1)))["dfid"]
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    for asked in (("audit", dfid), ("audit", dfid[:8]), ("flows", "--state", state), ("escalations", "list")):
        Watched.plans.clear()
        cli.ok(*asked, "--gate", "./toll")
        assert [step for step in Watched.plans if " f " in f"{step} " or "decision_flows" in step]
        assert {"SCAN sqlite_master", "SCAN CONSTANT ROW", "SCAN w"} >= {  # `w`: the cases of one page
            step for step in Watched.plans if step.startswith("SCAN")
        }


def test_a_list_says_when_there_is_more(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "opened_engine", lambda *_, **__: nullcontext(Greedy("ESCALATE")))
    for number in (1, 2, 3):
        cli.ok("decide", "./toll", "--event", event(number))
    for listed, more in (
        (("escalations", "list"), "only the oldest 2 of 3 are listed: --limit lists more\n"),
        (("flows",), "only the newest 2 are listed: --limit lists more\n"),
    ):
        code, out, said = cli(*listed, "--gate", "./toll", "--limit", "2")
        assert (0, 2, more) == (code, len(out.splitlines()), said)
        code, out, said = cli(*listed, "--gate", "./toll", "--limit", "3")
        assert (0, 3, "") == (code, len(out.splitlines()), said)


def test_a_backup_in_the_home_is_no_gate_that_lost_its_key(cli: Cli) -> None:
    cli.ok("run", "./toll", "--limit", "1")
    cli.ok("backup", "--gate", "toll", "--to", str(cli.folder.parent / "monday"))
    out = cli("doctor", "--gate", "./toll", "--model", "nowhere.gguf")[1]
    assert "is writable, 1 record in it is whole" in out
    cli.ok("ledger", "verify", "--gate", "monday")


def test_doctor_and_the_linter_look_at_any_gate(cli: Cli) -> None:
    cli.ok("run", "./toll", "--limit", "2")
    code, out, _ = cli("doctor", "--gate", "./toll", "--model", "nowhere.gguf")
    assert 1 == code
    assert "ok    contract: toll 1.0.0, owner toll@bridge.example" in out
    assert "ok    outside: the record of toll holds every order in the statement of its executor" in out
    assert "flights" not in out
    Path("contract.yaml").write_text(GATE.split('"""')[1], encoding="utf-8")
    assert "0 errors" not in cli("contracts", "check", "contract.yaml", "--source", "./toll")[1]


def test_the_linter_reads_the_state_of_a_gate_without_a_queue_for_the_keys_of_its_record(cli: Cli) -> None:
    cli.ok("decide", "./toll", "--event", event(1))
    written(Path("quiet"), GATE.replace(", events=events", ""))
    terms = GATE.split('"""')[1]
    for more, said in (("", "snapshots tried"), (", car.wheels: int", "`car.wheels` is missing in")):
        Path("contract.yaml").write_text(terms.replace("fixed(2)}", f"fixed(2){more}}}"), encoding="utf-8")
        _, out, err = cli("contracts", "check", "contract.yaml", "--source", "./quiet")
        assert said in out, err


REFUSING = """
    def check_contract(self, contract):
        raise UsageError(f"nobody carries out {', '.join(contract.kinds)}")
"""


def test_doctor_says_before_the_first_run_that_an_executor_cannot_carry_out_what_the_contract_permits(
    cli: Cli, tmp_path: Path
) -> None:
    refusing = GATE.replace("    idempotent = True\n", "    idempotent = True\n" + REFUSING)
    written(tmp_path / "toll", refusing.replace("import GateDefinition", "import UsageError, GateDefinition"))
    out = cli("doctor", "--gate", "./toll", "--model", "nowhere.gguf")[1]
    assert "FAIL  outside: nobody carries out WAIVE, DENY" in out
    assert not cli.folder.exists()


def test_a_case_that_was_decided_is_not_taken_up_again(cli: Cli) -> None:
    answer = json.loads(cli.ok("decide", "./toll", "--event", event(1)))
    assert 2 == cli("retry", answer["dfid"], "--gate", "./toll")[0]

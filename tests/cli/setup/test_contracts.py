"""`sds contracts`, as a deployment meets it: what is wrong, what changes, and what is put in force."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Shell
from tests.gates import own
from tests.kernel import world

REFUND = ROOT / "sds" / "gates" / "refund" / "contract.yaml"
WIDER = (("version: 1.0.0", "version: 1.1.0"), ("max_minor: 100000", "max_minor: 200000"))
NARROWER = (("version: 1.0.0", "version: 1.1.0"), ("[OWED, LATE]", "[OWED]"))
BROKEN = (("when: claim.due", "when: claim.due && !claim.due"),)


@pytest.fixture
def home(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def written(folder: Path, *edits: tuple[str, str], name: str = "till.yaml") -> str:
    file = folder / name
    file.write_text(world.edited(*edits), encoding="utf-8")
    return str(file)


def test_findings_name_file_line_and_mend(home: Shell, tmp_path: Path) -> None:
    file = written(tmp_path, ("till@shop.example", "the till"))
    done = home("contracts", "check", file)
    assert 0 == done.returncode, done.stderr
    expected = (
        f"{file}:4: warning: the owner `the till` is not an address: nobody can be reached when the agent is suspended"
    )
    assert f"{expected}; name a human, with an address" in done.stdout
    assert "snapshots tried)" in done.stdout.splitlines()[-1]


def test_errors_fail_and_warnings_fail_only_when_strict(home: Shell, tmp_path: Path) -> None:
    fine, broken = written(tmp_path), written(tmp_path, *BROKEN, name="broken.yaml")
    assert 0 == home("contracts", "check", fine).returncode
    assert 1 == home("contracts", "check", fine, "--strict").returncode
    done = home("contracts", "check", broken)
    assert 1 == done.returncode
    assert f"{broken}:17: error: `when` never holds (proven by intervals)" in done.stdout
    done = home("contracts", "check", written(tmp_path, ("gate: till", "gate: Till"), name="bad.yaml"))
    assert (2, "") == (done.returncode, done.stdout)
    assert "bad.yaml:1: gate: `Till` is not a name in_lower_case" in done.stderr


def test_a_contract_with_control_characters_is_neither_checked_nor_registered(home: Shell, tmp_path: Path) -> None:
    file = written(tmp_path, ("mission: Decide who is paid.", r'mission: "Decide \e[2J"'))
    for command in (("check", file), ("register", file, "--reason", "r")):
        done = home("contracts", *command)
        assert (2, "") == (done.returncode, done.stdout)
        assert f"error: {file}:6: the character U+001B is not allowed" in done.stderr


def test_findings_can_be_read_by_a_machine(home: Shell, tmp_path: Path) -> None:
    found = json.loads(home("contracts", "check", written(tmp_path, *BROKEN), "--json").stdout)
    assert 1 == found["counts"]["error"]
    [error] = [finding for finding in found["findings"] if finding["severity"] == "error"]
    assert ("when-never", 17, "when") == (error["rule"], error["line"], error["path"])


def test_the_refund_contract_has_no_errors_against_its_own_source(home: Shell) -> None:
    found = home.json("contracts", "check", str(REFUND), "--source", "refund", "--json")
    assert 0 == found["counts"]["error"]
    assert "field-not-at-source" not in {finding["rule"] for finding in found["findings"]}
    other = written(home.home, ("gate: till", "gate: till"), name="till.yaml")
    done = home("contracts", "check", other, "--source", "refund")
    assert 1 == done.returncode
    assert "`claim.due` is missing in" in done.stdout
    assert "the source has: flight.arr_delay_min" in done.stdout


def test_a_difference_shows_what_becomes_possible_with_a_snapshot(home: Shell, tmp_path: Path) -> None:
    old, new = written(tmp_path), written(tmp_path, *WIDER, name="new.yaml")
    shown = home.ok("contracts", "diff", old, new)
    assert "+ PAY amount: 0.01 to 1000.00 -> 0.01 to " in shown
    assert "    when account.left=" in shown
    assert (
        "+ spend.day: {name: day, window: day, max_minor: 100000} -> {name: day, window: day, max_minor: 200000}"
        in shown
    )
    assert shown.splitlines()[-1].startswith("the new contract permits more: ")
    back = home.json("contracts", "diff", new, old, "--json")
    assert [] == back["more"]
    assert {"narrower"} == {change["direction"] for change in [*back["decisions"], *back["settings"]]}


def test_a_changed_policy_is_shown_as_yaml_writes_it(home: Shell, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text(REFUND.read_text(encoding="utf-8").replace("['clear', 'rain']", "['clear']"), encoding="utf-8")
    (line,) = [each for each in home.ok("contracts", "diff", str(REFUND), str(new)).splitlines() if "policy: " in each]
    assert line.startswith("~ policy: {kind: DENY, reason: NOT_ELIGIBLE, when: !flight.due || ")
    assert "=" not in line.replace("==", "").replace("<=", "").replace(">=", "")


def test_state_of_another_gate_or_of_one_without_a_queue_is_refused(home: Shell, tmp_path: Path) -> None:
    till = written(tmp_path)
    for _ in range(2):
        done = home("contracts", "diff", till, till, "--gate", "refund")
        assert (2, "") == (done.returncode, done.stdout)
        assert "error: the contract is for gate `till`, not for `refund`" == done.stderr.splitlines()[0]
    (tmp_path / "till.py").write_text(
        "from pathlib import Path\n"
        "from sds import GateDefinition\n"
        "gate = GateDefinition(name='till', contract=Path(__file__).with_name('till.yaml'), open=lambda folder: None)\n"
    )
    done = home("contracts", "check", till, "--source", str(tmp_path / "till.py"))
    assert 2 == done.returncode
    assert "is read for the keys of its queue or its record, and it has neither" in done.stderr


def test_a_contract_that_permits_more_is_registered_only_with_an_acknowledgement(home: Shell, tmp_path: Path) -> None:
    first, wider = written(tmp_path), written(tmp_path, *WIDER, name="wider.yaml")
    assert "till: version 1.0.0 is in force" in home.ok("contracts", "register", first, "--reason", "first")
    refused = home("contracts", "register", wider, "--reason", "more")
    assert 2 == refused.returncode
    assert "error: the contract permits more than the registered version `1.0.0`: " in refused.stderr
    assert "mend:  read the difference, then add --acknowledge" in refused.stderr
    assert ["in force"] == [each["standing"] for each in home.json("contracts", "list", "--gate", "till", "--json")]
    home.ok("contracts", "register", wider, "--reason", "more is wanted", "--acknowledge")
    listed = home.json("contracts", "list", "--gate", "till", "--json")
    assert [("1.0.0", "superseded"), ("1.1.0", "in force")] == [(each["version"], each["standing"]) for each in listed]
    assert "more is wanted" == listed[1]["reason"]
    assert "more is wanted" in home.ok("contracts", "list", "--gate", "till")
    assert "0 faults" in home.ok("ledger", "verify", "--gate", "till")
    older = home("contracts", "register", first, "--reason", "back")
    assert 2 == older.returncode
    assert "version `1.0.0` differs from the registered `1.1.0` but is not higher" in older.stderr


def test_what_cannot_be_registered_is_refused_before_an_acknowledgement_is_asked_for(
    home: Shell, tmp_path: Path
) -> None:
    same_version = written(tmp_path, WIDER[1], name="wider.yaml")
    home.ok("contracts", "register", written(tmp_path), "--reason", "first")
    refused = home("contracts", "register", same_version, "--reason", "more")
    assert "version `1.0.0` differs from the registered `1.0.0` but is not higher" in refused.stderr
    assert "+ PAY amount: " in refused.stdout
    unsaid = home("contracts", "register", written(tmp_path, *WIDER, name="wider.yaml"), "--reason", " ")
    assert "error: a reason is needed" == unsaid.stderr.splitlines()[0]


def test_a_contract_is_named_by_the_path_of_its_gate(home: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "my gate"
    home.ok("new", "parking", "--folder", str(folder))
    file = f"{folder.resolve()}/contract.yaml"
    assert file == home.json("contracts", "check", f"{folder}/", "--json")["file"]
    assert file == home.json("contracts", "check", str(folder / "gate.py"), "--json")["file"]
    assert [] == home.json("contracts", "diff", str(folder), file, "--json")["more"]
    assert "parking: version " in home.ok("contracts", "register", str(folder), "--reason", "first")
    unsaid = home("contracts", "check", str(own.written(tmp_path / "toll")))
    assert "error: the contract of gate `toll` has no file of its own" == unsaid.stderr.splitlines()[0]
    assert f"there is no gate at `{tmp_path}`" in home("contracts", "check", str(tmp_path)).stderr


def test_who_registers_a_contract_before_its_day_is_told_that_a_human_decides_until_then(
    home: Shell, tmp_path: Path
) -> None:
    later = written(tmp_path, ("effective_from: 2020-01-01", "effective_from: 9999-12-31"))
    said = home.ok("contracts", "register", later, "--reason", "first").splitlines()
    assert "before 9999-12-31 (UTC) every case goes to a human" == said[-1]


def test_a_contract_that_permits_less_needs_no_acknowledgement(home: Shell, tmp_path: Path) -> None:
    home.ok("contracts", "register", written(tmp_path), "--reason", "first")
    narrower = written(tmp_path, *NARROWER, name="narrower.yaml")
    found = json.loads(home.ok("contracts", "register", narrower, "--reason", "less", "--json"))
    assert ("1.1.0", []) == (found["version"], found["diff"]["more"])


def test_a_contract_no_case_of_which_a_model_could_decide_is_not_registered(home: Shell, tmp_path: Path) -> None:
    file = written(tmp_path, ("kinds:", "budget: {tokens_max: 100}\nkinds:"))
    assert 1 == home("contracts", "check", file).returncode
    done = home("contracts", "register", file, "--reason", "first", "--acknowledge")
    assert 2 == done.returncode
    assert "exceed the budget of one flow, 100: every case escalates" in done.stderr
    assert not (home.home / "till").exists()


def test_nothing_is_registered_that_is_broken_altered_or_for_another_gate(home: Shell, tmp_path: Path) -> None:
    file, broken = written(tmp_path), written(tmp_path, *BROKEN, name="broken.yaml")
    done = home("contracts", "register", broken, "--reason", "first", "--acknowledge")
    assert 2 == done.returncode
    assert "error: the contract has 1 error: `when` never holds" in done.stderr
    done = home("contracts", "register", file, "--reason", "first", "--sha256", "0" * 64)
    assert 2 == done.returncode
    assert "the checksum differs from the one it was released with" in done.stderr
    done = home("contracts", "register", file, "--reason", "first", "--gate", "refund")
    assert 2 == done.returncode
    assert "the contract is for gate `till`, not for `refund`" in done.stderr
    assert not (home.home / "till").exists()
    digest = sha256(Path(file).read_bytes()).hexdigest()
    home.ok("contracts", "register", file, "--reason", "first", "--sha256", digest, "--gate", "till")

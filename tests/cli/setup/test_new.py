"""`sds new`: what it writes is whole, decides at once, and passes its own tests."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return Cli(capsys, monkeypatch, tmp_path / "home" / "fraud_watch")


def test_a_new_gate_decides_at_once_and_its_contract_has_no_findings(cli: Cli) -> None:
    said = cli.ok("new", "fraud_watch")
    assert "sds run ./fraud_watch --limit 3" in said
    assert "my_gate" not in (
        text := Path("fraud_watch/gate.py").read_text() + Path("fraud_watch/contract.yaml").read_text()
    )
    assert "agent_id: fraud-watch-agent" in text
    report = json.loads(cli.ok("run", "./fraud_watch", "--limit", "2", "--json").splitlines()[-1])
    assert (2, 2, 0, 0, []) == tuple(
        report[n] for n in ("decisions", "decided_by_model", "out_of_envelope", "double_payouts", "record_faults")
    )
    assert 0o600 == (cli.folder / "payments.db").stat().st_mode & 0o777, "`sds doctor` refuses what others can read"
    Path("event.json").write_text(cli.ok("events", "--gate", "./fraud_watch", "--limit", "1"))
    assert "CLOSED" == json.loads(cli.ok("decide", "./fraud_watch", "--event", "event.json"))["state"]
    for command in (("recover",), ("escalations", "list")):
        cli.ok(*command, "--gate", "./fraud_watch")
    assert "no findings" in cli.ok(
        "contracts", "check", "fraud_watch/contract.yaml", "--source", "./fraud_watch", "--strict"
    )


def test_what_it_prints_to_type_works_for_a_folder_with_a_blank_in_its_name(cli: Cli) -> None:
    tried, checked = cli.ok("new", "cards", "--folder", "my gates/cards").splitlines()[1:]
    assert "try it:   sds run './my gates/cards' --limit 3" == tried
    assert "check it: sds contracts check './my gates/cards'; pytest './my gates/cards'" == checked
    assert "no findings" in cli.ok(*shlex.split(checked.split(";")[0])[3:])


def test_nobody_else_can_write_what_a_new_gate_decides_with(cli: Cli) -> None:
    """As its contract, which is refused otherwise."""
    before = os.umask(0)
    try:
        cli.ok("new", "cards")
    finally:
        os.umask(before)
    made = Path("cards")
    assert [0, 0, 0, 0] == [path.stat().st_mode & 0o002 for path in (made, *made.iterdir())]


def test_the_tests_of_a_new_gate_pass(cli: Cli) -> None:
    cli.ok("new", "cards", "--folder", "gates/one")
    done = python("pytest", "-q", "-p", "no:cacheprovider", "gates/one")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("Fraud",), "`Fraud` is not the name of a gate"),
        (("../fraud",), "`../fraud` is not the name of a gate"),
        (("refund",), "an installed gate is already named `refund`"),
        (("there",), "`there` already exists, and no file is overwritten"),
        (("cards", "--folder", "file/below"), "`file/below` cannot be written"),
    ],
)
def test_nothing_is_written_over_and_a_mistake_leaves_nothing(cli: Cli, args: tuple[str, ...], message: str) -> None:
    Path("there").mkdir()
    Path("file").write_text("mine")
    code, _, said = cli("new", *args)
    assert (2, True) == (code, message in said), said
    assert ["file", "there"] == sorted(path.name for path in Path().iterdir() if path.name != "home")
    assert ([], "mine") == (list(Path("there").iterdir()), Path("file").read_text())


def test_a_new_gate_is_measured_on_its_own_queue_and_leaves_nothing(cli: Cli) -> None:
    cli.ok("new", "fraud_watch")
    measured = ("sds.benchmarks.gate", "--gate", "./fraud_watch", "--n", "2", "--json")
    report = json.loads(python(*measured).stdout.splitlines()[-1])
    names = ("gate", "decisions", "out_of_envelope", "record_faults")
    assert ("fraud_watch", 2, 0, []) == tuple(report[name] for name in names)
    assert ["fraud_watch"] == [path.name for path in Path().iterdir()]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a module in this folder, in a process of its own."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

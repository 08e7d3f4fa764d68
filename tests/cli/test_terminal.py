"""Nothing that a command prints controls the terminal, wherever it comes from; JSON holds it as an escape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from sds.cli.decisions import decide
from sds.cli.render import Console, echo, print_json
from sds.kernel.canonical import is_seen
from tests.cli.conftest import Cli
from tests.gates.own import written
from tests.kernel.durable import proposal
from tests.proposers import Says

# ESC, BEL, DEL, CSI of C1, NEL, right-to-left override, an isolate, a joiner, a line separator, a tag
HOSTILE = "a\x1b[2J\x07\x7f\x9b2J\x85\u202ecod\u2066\u200b\u2028\U000e0041z"


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `sds` with a gate `toll` that hands each case to a human, in a home with a hostile name."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home\x1b[2J\u202e"))
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "toll")
    engine = Says(proposal("ESCALATE", "HUMAN_REVIEW"))
    monkeypatch.setattr(decide, "opened_engine", lambda *_, **__: nullcontext(engine))
    return Cli(capsys, monkeypatch, tmp_path)


def unseen(text: str) -> set[str]:
    return {char for char in text if not is_seen(char)} - {"\n"}


def decided(cli: Cli, trip: str = "T-1", text: str = HOSTILE) -> str:
    """Decide an event with a hostile text; return its dfid."""
    event = {"trip_id": trip, "car_id": "CAR-1", "text": text}
    Path("event.json").write_text(json.dumps(event), encoding="utf-8")
    return str(json.loads(cli.ok("decide", "./toll", "--event", "event.json"))["dfid"])


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "{dfid}", "--gate", "toll"),
        ("flows", "--gate", "toll"),
        ("escalations", "list", "--gate", "toll"),
        ("escalations", "show", "{dfid}", "--gate", "./toll"),
        ("backup", "--gate", "toll", "--to", "kept\x1b[2J\u202e"),
        ("keys", "show", "--gate", "toll"),
        ("doctor", "--gate", "./toll"),
        ("flows", "--gate", HOSTILE),
        ("run", HOSTILE),
        ("erase", HOSTILE, "--gate", "toll", "--reason", "r"),
        ("erase", HOSTILE, "b\u202e", "--gate", "toll", "--reason", "r"),
        ("models", "show", "none\x1b[2J\u202e"),
        ("contracts", "check", "none\x1b[2J\u202e"),
        ("new", "gate", "--into", "fresh\x1b[2J\u202e"),
        ("nothing\x1b[2J\u202e",),
    ],
    ids=lambda command: " ".join(command[:2]).encode("unicode_escape").decode()[:24],
)
def test_no_command_prints_what_controls_a_terminal(cli: Cli, command: tuple[str, ...]) -> None:
    given = [word.format(dfid=decided(cli)) for word in command]
    for more in ((), ("--json",)):
        _, out, err = cli(*given, *more)
        assert out or err
        assert set() == unseen(out + err)


def test_json_holds_it_as_escapes_and_reads_back(cli: Cli) -> None:
    record: Any = cli.json("audit", decided(cli), "--gate", "toll")
    assert HOSTILE == json.loads(record["decision_flows"]["trigger_event"])["text"]


def test_what_is_printed_in_each_way_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({HOSTILE: [HOSTILE, "é 😀 \ud800"]})
    printed = capsys.readouterr().out
    assert set() == unseen(printed)
    assert r"\u001b[2J\u0007\u007f\u009b2J\u0085\u202ecod\u2066\u200b\u2028\udb40\udc41z" in printed
    assert "é 😀 \\ud800" in printed
    assert {HOSTILE: [HOSTILE, "é 😀 \ud800"]} == json.loads(printed)
    echo(f"one\r\ntwo\r{HOSTILE}\n")
    assert rf"two\r{ascii(HOSTILE)[1:-1]}" in capsys.readouterr().out.partition("one\r\n")[2]
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    console = Console(width=500, soft_wrap=True)
    console.print(table)
    console.print(f"é {HOSTILE}")
    printed = capsys.readouterr().out
    assert set() == unseen(printed)
    assert 4 == printed.count(ascii(HOSTILE)[1:-1])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_every_command_writes_utf_8_to_a_pipe_in_any_locale(cli: Cli, tmp_path: Path, encoding: str) -> None:
    trip = "T-日本"
    dfid = decided(cli, trip, "für 🎂")
    settings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": encoding}

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sds.cli.app", *words],
            env={**os.environ, **settings},
            check=True,
            capture_output=True,
        )
        return done.stdout.decode()

    assert ["für 🎂", trip] == [
        line.partition(": ")[2]
        for line in said("audit", dfid, "--gate", "toll").splitlines()
        if "text:" in line or "trip" in line
    ]
    assert trip in said("flows", "--gate", "toll")
    assert trip == json.loads(said("escalations", "list", "--gate", "toll", "--json"))[0]["event_id"]
    said("escalations", "resolve", dfid, "--gate", "./toll", "--abort", "--reason", "r")
    assert f"{trip}: the texts are erased\n" == said("erase", "--event", trip, "--gate", "toll", "--reason", "r")

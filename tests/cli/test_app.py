"""How the command line ends: exit codes, closed pipes, full disks, and mistakes in the words typed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer

from sds.cli import app as cli
from sds.cli.common import read_event_text
from sds.cli.records import record
from sds.host.paths import open_record
from sds.kernel.errors import EventError, SdsError, StoreError, WorldError
from tests.cli.conftest import ROOT, Shell

COMMAND = [sys.executable, "-m", "sds.cli.app"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--version"], 0, []),
        (["ledger", "--help"], 0, []),
        (["fly"], 2, ["error: No such command 'fly'.", "mend:  sds --help"]),
        (["ledger", "burn"], 2, ["error: No such command 'burn'.", "mend:  sds ledger --help"]),
        (["run", "refund", "--limit"], 2, ["error: Option '--limit' requires an argument.", "mend:  sds run --help"]),
        (["ledger", "verify", "--head"], 2, ["error: Option '--head' requires an argument.", "mend:  sds ledger verify --help"]),
        (["halt"], 2, ["error: Missing option '--reason'.", "mend:  sds halt --help"]),
        (
            ["run", "refund", "--chaos", "fire"],
            2,
            ["error: Invalid value for '--chaos': 'fire' is not one of 'drift', 'agent-drift', 'fail-second'.", "mend:  sds run --help"],
        ),
        (
            ["contracts", "check", "/nowhere.yaml"],
            2,
            ["error: /nowhere.yaml: cannot be read: no such file or directory", "mend:  check the path"],
        ),
        (["run", "loans"], 2, ["error: there is no gate `loans`", "mend:  the gates are: fraud, refund; for a gate of your own, give its path"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_its_mend(
    args: list[str], code: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code == cli._run(args)
    assert said == capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("kind", [WorldError, *WorldError.__subclasses__()])
def test_a_failure_of_the_world_has_a_mend_its_own_or_that_of_its_kind(
    kind: type[WorldError], capsys: pytest.CaptureFixture[str]
) -> None:
    for error, mend in ((kind("no"), None), (kind("no", hint="wait"), "mend:  wait")):
        error.hint = error.hint or cli._mend(error, "sds run")
        assert 1 == cli._say(error)
        said, mended = capsys.readouterr().err.splitlines()
        assert "error: no" == said
        assert mended == mend if mend else mended.startswith("mend:  ")


@pytest.mark.parametrize(
    ("args", "loaded"),
    [
        (["--version"], []),
        (["ledger", "--help"], ["record"]),
        (["keys", "show", "--help"], ["keys"]),
        (["--help"], ["run", "serve", "doctor", "evaluate"]),
    ],
    ids=" ".join,
)
def test_only_the_modules_of_commands_that_are_asked_for_are_imported(args: list[str], loaded: list[str]) -> None:
    code = "import sys; from sds.cli import app; assert 0 == app._run(sys.argv[1:]); print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    parts = [each.split(".") for each in done.stdout.splitlines()]
    found = {each[-1] for each in parts if each[:2] == ["sds", "cli"] and len(each) == 4}
    assert found >= set(loaded) if "run" in loaded else found == set(loaded)


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == cli._run([])
    assert capsys.readouterr().err.startswith("Usage: sds ")


def test_a_file_without_the_right_to_read_it_is_said_with_what_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "till.yaml").write_text("gate: till")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root has every right
    assert 2 == cli._run(["contracts", "check", str(tmp_path / "till.yaml")])
    error, mend = capsys.readouterr().err.splitlines()
    assert (True, "mend:  check that this user has the rights to it") == (error.endswith("is not readable."), mend)


def test_an_error_whose_causes_go_round_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, other = WorldError("the server cannot be reached"), WorldError("no engine is left")
    error.__cause__, other.__cause__ = other, error
    monkeypatch.setattr(cli, "_refuse_empty", fails_with(error))
    assert 1 == cli._run(["flows"])
    assert "error: the server cannot be reached" == capsys.readouterr().err.splitlines()[0]


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_refuse_empty", fails_with(ModuleNotFoundError("No module named 'x'", name="x")))
    assert 1 == cli._run(["flows"])
    assert ["error: the package `x` is not installed", "mend:  install this program again, with all that it needs"] == (
        capsys.readouterr().err.splitlines()
    )


def fails_with(error: BaseException) -> Callable[[list[str]], int]:
    def fail(_args: list[str]) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"), [(BrokenPipeError(), 0), (OSError(28, "No space left"), 1), (KeyboardInterrupt(), 130)], ids=repr
)
def test_the_exit_code_says_how_it_ended(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run", fails_with(error))
    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert code == ended.value.code
    assert (code == 1) == capsys.readouterr().err.startswith("error: the operating system refused: ")


@pytest.mark.parametrize("args", [["run", "--help"], ["bench", "report", "--help"]], ids=" ".join)
def test_a_reader_that_has_had_enough_is_no_failure(args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *args], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
    )
    os.close(writing)

    assert (0, "") == (done.returncode, done.stderr)


def test_without_a_standard_output_nothing_is_a_traceback() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "run", "--help"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "run", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
        )  # fmt: skip

    assert (1, ["error: the operating system refused: no space left on device", "mend:  free disk space"]) == (
        done.returncode,
        done.stderr.splitlines(),
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(13, "Permission denied", "/a/b"),
            ["`/a/b`: permission denied", "check that this user may read and write there"],
        ),
        (OSError(24, "Too many open files"), ["too many open files", "raise the limit of open files: ulimit -n"]),
        (
            RuntimeError("can't start new thread"),
            ["no thread can be started", "raise the limit of processes and threads: ulimit -u"],
        ),
        (MemoryError(), ["cannot allocate memory", "end other programs, or raise the limit: ulimit -v"]),
    ],
    ids=repr,
)
def test_what_the_machine_refuses_is_said_with_its_mend(
    error: Exception, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "open_store", fails_with(error))
    monkeypatch.setattr(sys, "argv", ["sds", "flows"])
    with pytest.raises(SystemExit) as ended:
        cli.main()

    first, second = capsys.readouterr().err.splitlines()
    assert 1 == ended.value.code
    assert first == f"error: the operating system refused: {said[0]}"
    assert second.startswith(f"mend:  {said[1]}")


def test_a_store_that_the_machine_refuses_has_the_machines_mend() -> None:
    error = StoreError("`service.db` cannot be used: permission denied")
    error.__cause__ = PermissionError(13, "Permission denied")
    assert cli.MACHINE_MENDS[errno.EACCES] == cli._mend(error, "sds keys add")


@pytest.mark.parametrize("where", ["/dev/full", "a pipe that nobody reads"])
def test_a_mistake_is_one_where_nobody_can_be_told(where: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    told = writing if where != "/dev/full" else os.open(where, os.O_WRONLY)
    done = subprocess.run([*COMMAND, "nonsense"], stderr=told, cwd=ROOT, timeout=60, check=False)
    for descriptor in {told, writing}:
        os.close(descriptor)

    assert 2 == done.returncode


def test_a_page_of_no_width_hides_no_error() -> None:
    environment = {**os.environ, "COLUMNS": "0"}
    done = subprocess.run(
        [*COMMAND, "nonsense"], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (2, ["error: No such command 'nonsense'.", "mend:  sds --help"]) == (
        done.returncode,
        done.stderr.splitlines(),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the event is empty"),
        (" \n", "the event is empty"),
        ('{"a": 1}\n{"a": 2}\n', "there is more than one event"),
    ],
)
def test_a_file_without_exactly_one_event_says_so(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "event.json"
    file.write_text(text)
    with pytest.raises(EventError) as refused:
        read_event_text(str(file))

    assert message == str(refused.value)


@pytest.mark.parametrize("text", ['{"a": 1}\n', '{"a": 1} x', "nonsense", "[" * 5000])
def test_what_is_wrong_in_another_way_is_left_to_the_kernel(tmp_path: Path, text: str) -> None:
    file = tmp_path / "event.json"
    file.write_text(text)

    assert text == read_event_text(str(file))


@pytest.mark.parametrize(
    ("source", "message"), [("-", "standard input is closed"), ("", "--event names no file")], ids=["stdin", "nothing"]
)
def test_an_event_from_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SdsError, match=message):
        read_event_text(source)


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help
    for each, child in getattr(command, "commands", {}).items():
        yield from helps(child, f"{name} {each}")


@pytest.mark.parametrize(("name", "said"), list(helps(typer.main.get_command(cli.app), "sds"))[1:])
def test_every_command_and_every_group_has_help_with_an_example(name: str, said: str) -> None:
    example = said.rpartition("Example: ")[2]
    assert f"{name} " in f"{example} "


@pytest.mark.parametrize(
    ("locale", "typed", "recorded"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "Grüße, 日本".encode(), "Grüße, 日本"),
        ({"PYTHONUTF8": "1"}, "Grüße".encode("latin-1"), "Gr\\xfc\\xdfe"),
    ],
    ids=["another locale", "another terminal"],
)
def test_no_word_of_a_reason_is_lost_for_how_it_was_typed(
    locale: dict[str, str], typed: bytes, recorded: str, tmp_path: Path
) -> None:
    with closing(open_record(tmp_path / "toll")):
        pass
    command = [*(part.encode() for part in COMMAND), b"halt", b"--gate", b"toll", b"--reason", typed]
    environment = {**os.environ, **locale, "SDS_HOME": str(tmp_path)}
    subprocess.run(command, env=environment, cwd=ROOT, timeout=60, check=True)
    with closing(open_record(tmp_path / "toll")) as store:
        assert recorded == json.loads(store.value("SELECT body FROM ledger WHERE kind = 'HALT'"))["reason"]


def test_a_path_that_cannot_be_used_has_a_hint_about_the_path(shell: Shell, tmp_path: Path) -> None:
    for words in (
        ["label", "refund", "--reading", "cause", "--cases", str(tmp_path / "none")],
        ["restore", "--from", ".", "--public-key", str(tmp_path / "none")],
        ["artifacts", "put", "rules", str(tmp_path / "none"), "--reason", "x"],
    ):
        done = shell(*words)
        assert "mend:  check the path" == done.stderr.splitlines()[-1], done.stderr


WRITING = (
    ("backup", "--to"),
    ("new", "mine", "--folder"),
    ("eval", "refund", "--html"),
    ("fit", "refund", "--out"),
    ("label", "refund", "--out"),
    ("bench", "kernel", "--save"),
    ("sandbox-gateway", "--file"),
)
NO_PATHS = {
    "-": "`-` is no path to write to",
    " ": "the path to write to is blank",
    "~/x": "no shell has replaced `~` in `~/x`",
    "~ada/x": "no shell has replaced `~ada` in `~ada/x`",
}


def refused(
    command: tuple[str, ...], path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the error of a command that writes nothing into the folder in which it runs."""
    before = {*path.iterdir(), path / "home"}
    monkeypatch.chdir(path)
    monkeypatch.setenv("SDS_HOME", str(path / "home"))
    assert 2 == cli._run([*command])
    assert before >= {*path.iterdir()}
    error, mend = capsys.readouterr().err.splitlines()
    assert mend.startswith("mend: ")
    return error.removeprefix("error: ")


@pytest.mark.parametrize("given", NO_PATHS)
@pytest.mark.parametrize("command", WRITING, ids=lambda command: command[0])
def test_what_names_no_file_to_write_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    given: str,
) -> None:
    assert NO_PATHS[given] == refused((*command, given), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("given", ["loop", "file/page.html"])
def test_a_page_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    error = refused(("eval", "refund", "--html", given), tmp_path, monkeypatch, capsys)
    assert f"`{given}` cannot be written" == error


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("eval", "refund", "--labels"), "is larger than"),
        (("label", "refund", "--cases"), "is larger than"),
        (("sandbox-gateway", "--token-file"), "is larger than"),
        (("webhooks", "add", "http://127.0.0.1:9/", "--gate", "refund", "--secret-file"), "no record yet"),
    ],
)
def test_a_device_without_an_end_is_not_read_to_its_end(
    command: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sds.judgement.labels.FILE_BYTES_MAX", 1024)
    assert said in refused((*command, "/dev/zero"), tmp_path, monkeypatch, capsys)

"""`sds artifacts` and `sds retention`, as an operator meets them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from sds.host import paths
from sds.host.clock import now_ms
from sds.kernel.context import artifacts
from sds.kernel.context.artifacts import ARTIFACT_BYTES_MAX, DAY_MS
from tests.cli.conftest import Shell


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A home with an empty record."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    paths.open_record(paths.gate_home("refund")).close()
    return Shell(tmp_path)


def test_an_artifact_is_put_replaced_listed_and_retired(desk: Shell, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("Fares are net.\n")
    put = ("artifacts", "put", "fares", str(rules), "--reason", "winter timetable")
    assert desk.ok(*put).startswith("fares: version 1, sha256 ")
    assert desk.ok(*put).startswith("fares: version 1, sha256 ")
    rules.write_text("Fares are gross.\n")
    assert desk.ok(*put).startswith("fares: version 2, sha256 ")
    assert "fares: no longer in force" == desk.ok("artifacts", "retire", "fares", "--reason", "withdrawn").strip()
    assert ["no longer in force"] * 2 == [line[-18:] for line in desk.ok("artifacts", "list").splitlines()]
    assert [("fares", 1), ("fares", 2)] == [(a["name"], a["version"]) for a in desk.json("artifacts", "list", "--json")]
    desk.ok("ledger", "verify")


def test_a_sweep_says_what_it_removed_and_the_record_still_verifies(desk: Shell) -> None:
    with closing(paths.open_record(paths.gate_home("refund"))) as store:
        past_ms = now_ms() - 1000 * DAY_MS
        artifacts.put(store, "fares", "Fares are net.", who="desk", reason="r", now_ms=past_ms)
        artifacts.retire(store, "fares", who="desk", reason="r", now_ms=past_ms)
    assert ["1 removed", "0 removed"] == [
        desk.ok("retention", "sweep", "--reason", "monthly").strip() for _ in range(2)
    ]
    assert desk.ok("artifacts", "list").strip().endswith("swept")
    desk.ok("ledger", "verify")


@pytest.mark.parametrize(
    ("content", "args", "why"),
    [
        (b"\xff", ("put", "fares", "{file}"), "is not UTF-8 at byte 0"),
        (b"", ("put", "fares", "{file}"), f"the artifact is not 1 to {ARTIFACT_BYTES_MAX} bytes of text"),
        ("\u00fc".encode() * ARTIFACT_BYTES_MAX, ("put", "fares", "{file}"), "is larger than"),
        (b"x", ("put", "Fares!", "{file}"), "`Fares!` is not a name in_lower_case"),
        (b"x", ("put", "fares", "{file}.not"), "cannot be read: no such file or directory"),
        (b"x", ("retire", "fares"), "there is no artifact `fares` in force"),
        (b"x", ("retire", "f\udcff"), "`f\\udcff` is not text in UTF-8"),
        (b"x", ("put", "f\udcff", "{file}"), "`f\\udcff` is not text in UTF-8"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    desk: Shell, tmp_path: Path, content: bytes, args: tuple[str, ...], why: str
) -> None:
    file = tmp_path / "rules.txt"
    file.write_bytes(content)
    done = desk("artifacts", *(arg.format(file=file) for arg in args), "--reason", "a try")
    assert 2 == done.returncode
    assert why in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert [] == json.loads(desk.ok("artifacts", "list", "--json"))

"""`sds replay` in a process of its own, over the record of a gate of one's own: lines, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sds.cli.records.replay import _lines
from sds.replay import Circumstance, Parting, Replay
from tests.cli.conftest import Shell
from tests.replays import GATE, record


@pytest.fixture(scope="module")
def recorded(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Shell, str]:
    """A shell whose home has the record, and the dfid of its one decision."""
    home = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SDS_THREADS", "1")
        (dfid,) = record(home, model=tiny_path(1), events=1)
    return Shell(home), dfid


def test_a_fresh_process_decides_the_same_to_the_bit(
    recorded: tuple[Shell, str], tiny_path: Callable[[int], Path]
) -> None:
    shell, dfid = recorded
    found = shell.json("replay", dfid, "--gate", GATE, "--model", str(tiny_path(1)), "--json")
    assert (dfid, True, 0.0) == (found["dfid"], found["identical"], found["logp_apart_max"])
    assert [] == found["faults"] == found["circumstances"]
    assert found["recorded"] == found["replayed"]
    said = shell.ok("replay", dfid[:8], "--gate", GATE, "--model", str(tiny_path(1)))
    assert "identical: the same bytes, every probability bit-equal\n" == said


def test_another_model_exits_with_1_and_says_what_differs(
    recorded: tuple[Shell, str], tiny_path: Callable[[int], Path]
) -> None:
    shell, dfid = recorded
    done = shell("replay", dfid, "--gate", GATE, "--model", str(tiny_path(2)))
    assert (1, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("differs: ")
    assert "  weights: " in done.stdout
    found = shell("replay", dfid, "--gate", GATE, "--model", str(tiny_path(2)), "--json")
    assert 1 == found.returncode
    assert not json.loads(found.stdout)["identical"]


def test_what_cannot_be_replayed_exits_with_2_in_one_line(recorded: tuple[Shell, str], tmp_path: Path) -> None:
    shell, dfid = recorded
    unreadable = tmp_path / "model.gguf"
    unreadable.write_bytes(b"no model")
    for args, why in (
        (["nobody"], "error: there is no flow `nobody` in the record"),
        ([dfid, "--model", str(tmp_path / "none.gguf")], "none.gguf` cannot be read: no such file or directory"),
        ([dfid, "--model", str(unreadable)], "error: "),
    ):
        done = shell("replay", *args, "--gate", GATE)
        assert (2, "") == (done.returncode, done.stdout)
        assert why in done.stderr.splitlines()[0]
        assert "Traceback" not in done.stderr


def test_the_same_decision_in_an_older_form_is_told_as_such() -> None:
    form = '{"action":"DENY","%s":"LATE","context_ref":"' + "0" * 64 + '"}'
    was, now = form % "reason_code", form % "reason"
    found = Replay(
        dfid="d",
        recorded=was.encode(),
        replayed=now.encode(),
        faults=(),
        circumstances=(Circumstance("proposal_schema", "3.0.0", "4.0.0"),),
        parting=None,
        logp_apart_max=0.0,
        shared=0,
        bit_equal=False,
    )
    assert [
        "differs: the same decision",
        "  proposal_schema: 3.0.0 recorded, 4.0.0 here",
        f"  recorded: {was}",
        f"  replayed: {now}",
        "  scores: at most 0 difference in log-probability",
    ] == list(_lines(found))
    assert "differs: another decision" == next(_lines(replace(found, replayed=now.replace("LATE", "LOST").encode())))


def test_what_differs_is_told_cause_first() -> None:
    found = Replay(
        dfid="d",
        recorded=b"A",
        replayed=b"B",
        faults=("table attempts differs from its seal",),
        circumstances=(
            Circumstance("slots", 4, 1),
            Circumstance("machine", None, "m"),
            Circumstance("rows", [], [[1, 1]]),
        ),
        parting=Parting("amount[1]", "7", "", (0.75, 0.25), (0.25, None)),
        logp_apart_max=1.0,
        shared=3,
        bit_equal=False,
    )
    assert [
        "differs: another decision",
        "  the record was altered: table attempts differs from its seal",
        "  slots: 4 recorded, 1 here",
        "  machine: not recorded, m here",
        "  rows: a pass had other tokens or rows",
        "  batch: passes shared with other decisions: 3; a replay runs alone, in another shape",
        "  recorded: A",
        "  replayed: B",
        "  first difference: amount[1]",
        "    7: 0.75 recorded, 0.25 here",
        "    the end: 0.25 recorded, no option here",
    ] == list(_lines(found))


def test_a_model_is_refused_where_a_policy_decided_that_asks_none(
    shell: Shell, report: object, tiny_path: Callable[[int], Path]
) -> None:
    assert report
    dfid = next(each["dfid"] for each in shell.json("flows", "--json") if each["state"] == "CLOSED")
    done = shell("replay", dfid, "--model", str(tiny_path(1)))
    assert (2, "") == (done.returncode, done.stdout)
    assert [
        "error: the flow was decided by a policy that asks no language model",
        "mend:  leave out --model",
    ] == done.stderr.splitlines()[:2]
    assert "identical" in shell.ok("replay", dfid)

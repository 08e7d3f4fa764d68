"""`sds erase` over the record of a gate of one's own, in processes of their own: the texts are gone from every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sds.host.paths import key_path
from tests.cli.conftest import Shell
from tests.replays import GATE, record

WHY = "the customer asked for it"


@pytest.fixture
def recorded(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Shell, list[str]]:
    """A shell whose home has the record, and the dfids of its two decisions: of C0 and C1."""
    return Shell(tmp_path), record(tmp_path, model=tiny_path(1), events=2)


def test_the_texts_are_gone_from_every_command_and_the_rest_stays(
    recorded: tuple[Shell, list[str]], tiny_path: Callable[[int], Path]
) -> None:
    shell, (dfid, other) = recorded
    assert "flight 0 was 0 hours late" in shell.ok("audit", dfid, "--gate", GATE)
    said = shell.ok("erase", "--event", "C0", "--reason", WHY, "--gate", GATE)
    assert "C0: the texts are erased\n" == said
    audit = shell.ok("audit", dfid, "--gate", GATE)
    assert ("flight 0" in audit, "text: [erased]" in audit, "| [erased]" in audit) == (False, True, True)
    assert "bytes: [erased]" in audit
    assert dfid in shell.ok("flows", "--gate", GATE)
    refused = shell("replay", dfid, "--gate", GATE, "--model", str(tiny_path(1)))
    assert (2, "") == (refused.returncode, refused.stdout)
    assert refused.stderr.startswith("error: the texts of event `C0` were erased on ")
    assert f": {WHY}" in refused.stderr.splitlines()[0]
    assert "identical" in shell.ok("replay", other, "--gate", GATE, "--model", str(tiny_path(1)))
    assert ", 0 faults," in shell.ok("ledger", "verify", "--gate", GATE)


def test_what_was_done_is_told_as_json_and_what_cannot_be_done_in_one_line(recorded: tuple[Shell, list[str]]) -> None:
    shell, (dfid, _) = recorded
    found = shell.json("erase", "--event", "C0", "--reason", WHY, "--gate", GATE, "--json")
    assert {"dfid": dfid, "events": ["C0"], "in_clear": [], "overwritten": True} == found
    for args, line in (
        (["--event", "C0", "--reason", WHY], "error: the texts of event `C0` were erased on "),
        (["--event", "C9", "--reason", WHY], "error: there is no event `C9` of gate `claims` in the record"),
        (["--event", "C1", "--reason", " "], "error: a reason is needed"),
        (["--event", "C-\udcfc", "--reason", WHY], "error: `C-\\udcfc` is not text in UTF-8"),
    ):
        refused = shell("erase", *args, "--gate", GATE)
        assert (2, "") == (refused.returncode, refused.stdout)
        assert refused.stderr.startswith(line)


def test_without_the_kernels_key_a_case_is_told_without_its_texts_and_can_be_erased(
    recorded: tuple[Shell, list[str]], tmp_path: Path
) -> None:
    shell, (dfid, _) = recorded
    kept = key_path(tmp_path / GATE).rename(tmp_path / "kept.key")
    audit = shell.ok("audit", dfid, "--gate", GATE)
    assert ("flight 0" in audit, "text: [sealed]" in audit) == (False, True)
    refused = shell("replay", dfid, "--gate", GATE)
    assert refused.returncode == 1
    assert "mend:  put `kernel.key` back into the gate's folder" in refused.stderr
    assert "C0: the texts are erased\n" == shell.ok("erase", "--event", "C0", "--reason", WHY, "--gate", GATE)
    kept.rename(key_path(tmp_path / GATE))
    assert "text: [erased]" in shell.ok("audit", dfid, "--gate", GATE)

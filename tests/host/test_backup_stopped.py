"""Whoever backs up or restores and is stopped, or killed, in the middle: what is there is the old or the new, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from sds.host import backup as backups
from tests.attack.forks import fork
from tests.host.test_backup import backup, clean, decide, made, put_back


@pytest.mark.parametrize("done", [False, True])
def test_stopped_before_the_rename_the_old_record_is_there_and_stopped_after_it_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    bed, older, newer = made(tmp_path), tmp_path / "older", tmp_path / "newer"
    backup(bed, older)
    decide(bed, range(3, 5))
    backup(bed, newer)
    shutil.rmtree(bed.own)
    put_back(bed, older)
    entries = clean(bed)
    rename = Path.replace

    def killed(self: Path, target: Path) -> Path:
        """Stop at the rename of the record, as a process that is killed there: nothing after it is done."""
        if target.name == "decisions.db":
            if done:
                rename(self, target)
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        put_back(bed, newer)
    monkeypatch.undo()
    assert (clean(bed) > entries) == done
    put_back(bed, newer)
    assert clean(bed) > entries
    decide(bed, range(6))
    assert (6, 0) == (len(bed.bank.paid()), bed.paid_twice())


@pytest.mark.parametrize("restoring", [False, True])
def test_what_is_killed_in_the_middle_leaves_no_texts_and_keys_behind_once_it_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restoring: bool
) -> None:
    bed, there = made(tmp_path), tmp_path / "there"
    backup(bed, there)

    def work() -> object:
        return put_back(bed, there) if restoring else backup(bed, tmp_path / "next")

    def left() -> list[Path]:
        return [*tmp_path.glob(".*/kernel.key"), *bed.own.glob(".*/kernel.key")]

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as dies:
        dies.setattr("sds.host.backup.verified", killed)
        dies.setattr("sds.host.restoring.verified", killed)
        child = fork(work)
        os.waitpid(child, 0)
    assert 1 == len(left())
    assert work()
    assert [] == left()


def test_who_is_at_work_is_left_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed, asked, verified = made(tmp_path), list[int](), backups.verified

    def another(*given: Any) -> object:
        asked.append(len(asked))
        if len(asked) == 1:
            backup(bed, tmp_path / "second")
        return verified(*given)

    monkeypatch.setattr("sds.host.backup.verified", another)
    backup(bed, tmp_path / "first")
    assert [0, 1] == asked
    assert all((tmp_path / name / "manifest.json").exists() for name in ("first", "second"))

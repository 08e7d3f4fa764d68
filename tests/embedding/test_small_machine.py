"""Errors of a small machine: each names its mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds import Gate, GateDefinition
from sds.host.log import JsonLog
from sds.kernel.errors import StoreError
from sds.kernel.storage.sqlite import SqliteStore
from tests.attack.testbed import Teller, Testbed


@pytest.mark.sqlite_alone("a full disk of this machine")
def test_a_disk_that_is_full_in_the_middle_of_a_transaction(tmp_path: Path):
    store = SqliteStore(tmp_path / "decisions.db")
    pages = store.rows("SELECT page_count FROM pragma_page_count")[0][0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="disk is full") as refused, store.transaction():
        store.insert("resources", resource="x" * 100_000, epoch=0, drawn=0)
    assert ("free space on the disk", True) == (refused.value.hint, refused.value.retryable)
    store.close()


def test_a_folder_that_is_given_as_text(bed: Testbed):
    definition = GateDefinition(name="attack", contract=bed.terms, open=lambda _: (bed.accounts, bed.bank))
    with Gate.load(definition, folder=str(bed.own), engine=Teller()) as gate:  # type: ignore[arg-type]
        assert "SUCCESS" == gate.decide(bed.event(0)).execution


def test_a_log_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot be written") as refused:
        JsonLog(tmp_path / "log.jsonl")
    assert "check that you may write in its folder" == refused.value.hint

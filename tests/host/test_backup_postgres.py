"""Backups of a record in PostgreSQL, and into it: the same backup, whichever store it came from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from sds.host import paths, restoring
from sds.host.backup import back_up
from sds.host.restoring import restore
from sds.kernel.audit import verify
from sds.kernel.errors import UsageError
from tests.attack.testbed import settle
from tests.stores.server import server_url
from tests.storms import ground

GATE = "attack"


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ground.Bed]:
    """A gate that has decided three events, its record in PostgreSQL."""
    monkeypatch.setenv("SDS_STORE", server_url())
    made = ground.Bed(tmp_path / "bed")
    made.open_accounts(range(10))
    decide(made, range(3))
    yield made
    lose(made)


def decide(bed: ground.Bed, numbers: range) -> None:
    with bed.gate() as gate:
        for number in numbers:
            assert "SUCCESS" == settle(gate, bed.event(number)).execution


def backup(bed: ground.Bed, to: Path) -> None:
    with closing(paths.open_record(bed.own)) as store:
        back_up(store, bed.own, to, gate=GATE, with_key=True, now_ms=bed.clock())


def execute(sql: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server_url(), autocommit=True) as db:
        done = db.execute(sql)  # type: ignore[call-overload]  # of this test's own
        return done.fetchall() if done.description else []


def lose(bed: ground.Bed) -> None:
    execute(f"DROP SCHEMA IF EXISTS {paths.schema_name(bed.own)} CASCADE")
    shutil.rmtree(bed.own, ignore_errors=True)


def asides() -> list[tuple[object, ...]]:
    return execute("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'restoring_')")


def clean(bed: ground.Bed) -> None:
    with closing(paths.open_record(bed.own)) as store:
        assert () == verify.verify(store, None, paths.public_keys_of(bed.own)).faults


def test_a_record_in_postgresql_is_put_back_there_and_pays_nothing_twice(bed: ground.Bed, tmp_path: Path) -> None:
    backup(bed, tmp_path / "copy")
    decide(bed, range(3, 5))
    lose(bed)
    restore(tmp_path / "copy", bed.own, gate=GATE)
    clean(bed)
    with bed.gate() as gate:
        assert () == gate.recover().errors
    decide(bed, range(8))
    assert (8, 0, []) == (len(bed.bank.paid()), bed.accounts_paid_twice(), asides())
    clean(bed)


def test_a_backup_goes_from_postgresql_to_a_file_and_back(
    bed: ground.Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(bed, tmp_path / "copy")
    lose(bed)
    with monkeypatch.context() as files:
        files.delenv("SDS_STORE")
        restore(tmp_path / "copy", bed.own, gate=GATE)
        decide(bed, range(4))
        clean(bed)
        backup(bed, tmp_path / "second.tar")
    lose(bed)
    restore(tmp_path / "second.tar", bed.own, gate=GATE)
    decide(bed, range(5))
    assert (5, 0) == (len(bed.bank.paid()), bed.paid_twice())
    clean(bed)


def test_a_schema_with_a_record_is_not_replaced_and_an_empty_one_is(bed: ground.Bed, tmp_path: Path) -> None:
    backup(bed, tmp_path / "copy")
    with pytest.raises(UsageError, match="holds a record, up to entry ") as refused:
        restore(tmp_path / "copy", bed.own, gate=GATE)
    assert "ALTER SCHEMA" in refused.value.hint
    clean(bed)
    lose(bed)
    paths.open_record(bed.own).close()
    restore(tmp_path / "copy", bed.own, gate=GATE)
    decide(bed, range(4))
    assert (4, []) == (len(bed.bank.paid()), asides())


def test_a_restore_that_stops_leaves_no_record_that_is_empty_or_half(
    bed: ground.Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(bed, tmp_path / "copy")
    lose(bed)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(restoring.copying, "copy", stopped)
        with pytest.raises(KeyboardInterrupt):
            restore(tmp_path / "copy", bed.own, gate=GATE)
    assert not paths.has_record(bed.own)
    assert [] == asides()
    restore(tmp_path / "copy", bed.own, gate=GATE)
    clean(bed)


def test_a_record_that_somebody_has_open_is_not_replaced(bed: ground.Bed, tmp_path: Path) -> None:
    """They would go on with what they knew of the old one: also where it was renamed away beneath them."""
    backup(bed, tmp_path / "backup")
    name = paths.schema_name(bed.own)
    with closing(paths.open_record(bed.own)) as used:
        assert used.rows("SELECT 1 FROM ledger LIMIT 1")
        execute(f"ALTER SCHEMA {name} RENAME TO given_up_{name}")
        try:
            with pytest.raises(UsageError, match="in use by others"):
                restore(tmp_path / "backup", bed.own, gate=GATE)
        finally:
            execute(f"ALTER SCHEMA given_up_{name} RENAME TO {name}")
    assert [] == asides()

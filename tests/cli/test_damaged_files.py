"""Whatever is in a file that a command reads: it ends well, or in one typed line."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from sds.cli import app as cli
from sds.cli.common import read_event_text
from sds.engines.config import load_engines
from sds.gates.refund.gate import CONTRACT, load_refund_contract, read_queue
from sds.host.keys import ledger_key, order_keys, read_ring
from sds.kernel.contract.schema import load_contract
from sds.kernel.errors import SdsError
from sds.kernel.flow.intake import parse_event
from sds.kernel.storage.ledger import GENESIS, Head
from sds.models.catalog.catalog import Machine, Measured, Record, Source, read_record
from sds.models.protocol import BackendError
from tests.kernel.damage import cells, damage, damaged
from tests.kernel.tampering import full_record
from tests.scale import scale, seeded

ENGINES = b"""\
engines:
  - {name: box, kind: vllm, url: "http://127.0.0.1:9/v1", model: mine, timeout_ms: 8000, cool_down_ms: 5000}
  - {name: here, kind: native}
"""
EVENT = b'{"claim_id": "C-1", "ticket_id": "T-1", "claim_text": "caf\xc3\xa9"}'
CLAIM = EVENT.replace(b"}", b', "cause": "weather"}\n')
LIBRARY = "llamacpp"
MEASURED = Measured(
    type="Q8_0", library=LIBRARY, ms_min=1.0, ms_p50=2.0, ms_max=3.0, decisions=5, bytes=7, kl_mean=0.01
)
PREPARED = Record(
    form=5,
    source=Source(name="mine.gguf", sha256="0" * 64, type="F16", bytes=7),
    layers=None,
    file=None,
    sha256="0" * 64,
    bytes=7,
    type="Q8_0",
    library=LIBRARY,
    machine=Machine(cpu="x", features="avx2", cores=2, llama_cpp_python="0.3", openvino=None, integer=None),
    threads=2,
    measured=(MEASURED,),
    why="the fastest",
    shape_noise_logp_max=None,
    shape_noise_slots=None,
    date="2026-01-01",
)
INSERTED = (
    *(b"", b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\t", b"[" * 2000, b"{", b"}", b'"'),
    *(b":", b"- ", b"&a ", b"*a ", b"!!python/object:os.system ", b"null", b"1e999", b"9" * 400, b"\\ud800", b"NaN"),
    *(b"-1", b"~", b"? ", b"|\n", b"<<: ", b"\xe2\x80\xae", b"%YAML 9.9\n---\n", b"yes", b"0x10", b"2030-01-01"),
)


TERMS = load_refund_contract()


def read_event(path: Path) -> None:
    parse_event(TERMS, read_event_text(str(path)))
    parse_event(TERMS, path.read_bytes())


def _keys() -> bytes:
    """Return a file of keys as a gate makes it."""
    with TemporaryDirectory() as folder:
        order_keys(Path(folder), now_ms=1)
        ledger_key(Path(folder), Head(0, GENESIS), now_ms=2)
        return (Path(folder) / "kernel.key").read_bytes()


READ: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "event": (EVENT, read_event),
    "contract": (CONTRACT.read_bytes(), load_contract),
    "engines": (ENGINES, load_engines),
    "prepared": (PREPARED.model_dump_json().encode(), read_record),
    "kernel.key": (_keys(), read_ring),
    "an older kernel.key": (bytes(range(32)), read_ring),
    "claims.jsonl": (CLAIM * 3, lambda path: read_queue(path.parent)),
}


def spoiled(rng: Random, whole: bytes) -> bytes:
    """Return a file with bytes changed, taken out, put in or cut off, or in another encoding."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, how = rng.randrange(len(data) + 1), rng.randrange(5)
        if how == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif how == 1:
            del data[at : at + rng.choice((1, 3, 40))]
        elif how == 2:
            data[at:at] = rng.choice(INSERTED)
        elif how == 3:
            data[at:at] = data[(start := rng.randrange(len(data) + 1)) : start + rng.choice((5, 80))]
        elif rng.random() < 0.2:
            del data[at:]
    if rng.random() < 0.05:
        return bytes(data).decode("latin-1").encode(rng.choice(("utf-16", "utf-16-le", "utf-32-be", "utf-8-sig")))
    return bytes(data)


def told(error: SdsError | BackendError) -> None:
    assert 1 == len(str(error).splitlines()), str(error)


@pytest.mark.parametrize("name", READ)
def test_a_file_of_any_bytes_ends_well_or_in_one_typed_line(name: str, tmp_path: Path) -> None:
    whole, read = READ[name]
    path, rng = tmp_path / name, seeded(11)
    path.touch(mode=0o600)
    path.write_bytes(whole)
    read(path)
    for _ in range(scale(60, 20_000)):
        data = spoiled(rng, whole)
        path.write_bytes(data)
        print(data[:2000])
        try:
            read(path)
        except (SdsError, BackendError) as error:
            told(error)


@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_said_in_one_typed_line(name: str, tmp_path: Path) -> None:
    path, read = tmp_path / name, READ[name][1]
    for make in (path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to(tmp_path / "none")):
        make()
        with pytest.raises((SdsError, BackendError)) as caught:
            read(path)
        told(caught.value)  # type: ignore[arg-type]
        path.rmdir() if not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    "head", ["", "x", "1", "1:", ":", "1:" + "0" * 63, "1:" + "g" * 64, "-1:" + "0" * 64, "9" * 40 + ":" + "0" * 64]
)
def test_a_head_that_is_none_is_refused_in_one_line(
    head: str, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == cli._run(["ledger", "verify", "--gate", "claims", f"--head={head}"])
    assert ["error", "mend"] == [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The record of a gate of one's own, with one of everything in it; in memory, where there is a folder in it."""
    memory = Path("/dev/shm")  # noqa: S108  the name inside it is random
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        folder = Path(name) / "claims"
        folder.mkdir()
        full_record(folder).close()
        monkeypatch.setenv("SDS_HOME", name)
        yield (folder / "kernel.db").rename(folder / "decisions.db")


def commands(dfid: str) -> list[list[str]]:
    why = ["--reason", "a test"]
    return [
        ["flows", "--limit", "100"],
        ["flows", "--json"],
        ["flows", "--undecided"],
        ["audit", dfid],
        ["audit", dfid, "--json"],
        ["ledger", "head"],
        ["ledger", "verify"],
        ["ledger", "verify", "--json"],
        ["agents", "list"],
        ["agents", "show", "claims-agent"],
        ["agents", "show", "claims-agent", "--json"],
        ["contracts", "list"],
        ["artifacts", "list"],
        ["retention", "sweep", *why],
        ["agents", "suspend", "claims-agent", *why],
        ["agents", "revoke", "claims-agent", "1.0.0", *why],
        ["halt", *why],
        ["resume", *why],
    ]


def test_a_command_on_a_damaged_record_ends_in_one_line(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback; only a cell of another type than its table declares may end in a line that names a line of code."""
    rng, whole = seeded(5), record.with_suffix(".whole")
    shutil.copy(record, whole)
    with sqlite3.connect(whole) as db:
        dfids = [row[0] for row in db.execute("SELECT dfid FROM decision_flows")]
    db.close()
    for _, cell in zip(range(scale(50, 5_000)), cells(whole, rng), strict=False):
        for suffix in ("-wal", "-shm"):
            record.with_name(record.name + suffix).unlink(missing_ok=True)
        shutil.copy(whole, record)
        value, raw = damaged(rng, cell.value)
        try:
            damage(record, cell, value, raw=raw, rechain=False)
        except sqlite3.Error:
            continue
        for command in rng.sample(commands(rng.choice(dfids)), 2):
            print(cell.table, cell.column, ascii(value)[:100], raw, command)
            code = cli._run([*command, "--gate", "claims"])
            said = capsys.readouterr().err.splitlines()
            assert code in (0, 1, 2)
            assert bool(code) == (["error"] == [line[:5] for line in said if line[:5] not in ("mend:", "dfid:")]), said
            assert cell.bent_by(value, raw=raw) or not any("the command failed" in line for line in said), said


def test_what_nobody_foresaw_is_said_in_one_line_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], record: Path
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("neither\nthis nor that")

    monkeypatch.setattr("sds.kernel.registry.registry.agents", broken)
    assert 1 == cli._run(["agents", "list", "--gate", "claims"])
    first, mend = capsys.readouterr().err.splitlines()
    assert first.startswith("error: the command failed: TypeError at agents.py:")
    assert first.endswith(": neither this nor that")
    assert "sds ledger verify" in mend
    monkeypatch.setenv("SDS_TRACEBACK", "1")
    with pytest.raises(TypeError):
        cli._run(["agents", "list", "--gate", "claims"])


def test_an_event_in_utf_16_is_refused_with_its_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "event.json"
    path.write_bytes(json.dumps({"claim_id": "C-1"}).encode("utf-16"))
    assert 2 == cli._run(["decide", "refund", "--event", str(path)])
    assert [
        "error: the event is UTF-16 or UTF-32, not UTF-8",
        "mend:  save it as UTF-8 without a byte order mark",
    ] == capsys.readouterr().err.splitlines()

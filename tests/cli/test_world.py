"""What the command line does when the world around it is not as it should be: users, folders, packages, files."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sds.cli import common
from sds.cli.decisions import run as runs
from sds.cli.decisions import sagas
from sds.gates.refund.gate import ensure_world, gate
from sds.host.paths import decisions_path, key_path
from sds.kernel.errors import ModelError, SdsError, UsageError
from sds.kernel.registry import registry
from sds.kernel.storage.sqlite import SqliteStore
from tests.cli.conftest import ROOT, Shell

ORDER = "INSERT INTO execution_log VALUES ('d', 'k', 's', 'VOUCHER', '{}', 'T', '1', 'sig', 0, ?, NULL, NULL)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "refund"
    SqliteStore(decisions_path(made)).close()
    return made


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no entry")])
def test_a_user_without_a_name_is_named_by_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> str:
        raise error

    assert getpass.getuser() == common.operator()
    monkeypatch.setattr(getpass, "getuser", fail)
    assert f"uid {os.getuid()}" == common.operator()


def test_a_reset_keeps_what_was_there_under_another_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in (1, 2):
        folder.mkdir(exist_ok=True)
        (folder / "mark").write_text(str(n))
        runs._set_aside(folder)
        kept = folder.with_name(f"refund.old-{n}")

        assert f"the former folder is kept as `{kept}`\n" == capsys.readouterr().err
        assert (str(n), False) == ((kept / "mark").read_text(), folder.exists())


@pytest.mark.parametrize("status", ["PENDING", "UNKNOWN"])
def test_a_reset_is_refused_while_orders_are_in_the_air(folder: Path, status: str) -> None:
    with closing(SqliteStore(decisions_path(folder))) as store, store.transaction():
        store.run(ORDER, (status,))
    with pytest.raises(UsageError, match="a reset would forget 1 order in flight") as caught:
        runs._set_aside(folder)

    assert "sds recover" == caught.value.hint
    assert decisions_path(folder).exists()


@pytest.mark.parametrize(
    "mistake", [("--model", "nowhere.gguf"), ("--engines", "nowhere.yaml"), ("--saga", "NONE"), ("--device", "abacus")]
)
def test_a_reset_with_a_mistake_beside_it_leaves_all_as_it_was(tmp_path: Path, mistake: tuple[str, str]) -> None:
    (tmp_path / "refund").mkdir()
    (tmp_path / "refund" / "note.txt").write_text("mine")
    done = Shell(tmp_path)("run", "refund", "--limit", "1", "--reset", *mistake)
    assert 2 == done.returncode, done.stderr
    assert ["refund"] == [path.name for path in tmp_path.iterdir()]
    assert "mine" == (tmp_path / "refund" / "note.txt").read_text()


def test_a_reset_is_refused_while_halted(folder: Path) -> None:
    with closing(SqliteStore(decisions_path(folder))) as store:
        registry.set_halted(store, True, by="test", reason="test", now_ms=0)
    with pytest.raises(UsageError, match="`refund` is halted, and a reset would lift the halt") as caught:
        runs._set_aside(folder)

    assert 'sds resume --reason "..."' == caught.value.hint


def test_a_reset_is_refused_while_another_process_decides_there_and_leaves_no_entry(folder: Path) -> None:
    with closing(SqliteStore(decisions_path(folder))) as other:
        with pytest.raises(UsageError, match=f"other processes use the record `{decisions_path(folder)}`") as caught:
            runs._set_aside(folder)
        assert 0 == other.value("SELECT count(*) FROM ledger")
    assert "stop the gates and services that use it" == caught.value.hint
    runs._set_aside(folder)
    assert not folder.exists()


def test_a_reset_of_a_damaged_record_is_left_to_the_operator(folder: Path) -> None:
    decisions_path(folder).write_bytes(b"not a database" * 500)
    with pytest.raises(UsageError, match="file is not a database") as caught:
        runs._set_aside(folder)

    assert f"rename `{folder}` yourself" in caught.value.hint


GOOD = {
    "model": "a model",
    "decisions": 4,
    "decided_by_model": 4,
    "model_failed": {},
    "out_of_envelope": 0,
    "double_payouts": 0,
    "double_payout_faults": [],
    "record_faults": [],
    "moved_tickets_paid": 0,
    "moved_tickets_that_would_have_paid": 2,
    "unmoved_paid": 2,
}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"moved_tickets_that_would_have_paid": 0}, UsageError, "no changed ticket would have been paid, so this run"),
        ({"unmoved_paid": 0}, UsageError, "no unchanged ticket was paid, so this run proves nothing"),
        ({"moved_tickets_paid": 1}, SdsError, "a promise was broken: moved_tickets_paid"),
        ({"decided_by_model": 0, "model_failed": {"LOGITS_INVALID": 4}}, ModelError, "none of 4 claims was decided by"),
        ({"double_payouts": 1, "double_payout_faults": ["event E: paid 2 times"]}, SdsError, "event E: paid 2 times"),
    ],
)
def test_a_run_that_proves_nothing_or_breaks_a_promise_fails(
    changed: dict[str, object], error: type[SdsError], message: str
) -> None:
    sagas.judge(gate, GOOD, "drift")
    with pytest.raises(error, match=message):
        sagas.judge(gate, GOOD | changed, "drift")


def shell_in(home: Path, path: str = "") -> Callable[..., str]:
    ensure_world(home / "refund", claims=1)  # here the flights were read already

    def doctor() -> str:
        environment = os.environ.get("PYTHONPATH", "")
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, (path, str(ROOT), environment))))
            run = Shell(home).process if path else Shell(home)  # where a package is missing, in a process without it
            done = run("doctor", "--model", "README.md")
        assert 1 == done.returncode
        assert "Traceback" not in done.stderr
        return done.stdout

    return doctor


@pytest.mark.parametrize("package", ["llama_cpp", "numpy", "structlog"])
def test_doctor_names_a_missing_package_without_a_traceback(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    )

    assert f": a package is missing: No module named '{package}'" in shell_in(tmp_path, str(tmp_path))()


def test_doctor_says_what_an_import_says_that_fails_although_its_package_is_there(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('libgomp.so.1:\\nno such file')")

    assert ": an import failed: libgomp.so.1: no such file\n" in shell_in(tmp_path, str(tmp_path))()


def test_doctor_finds_a_damaged_record_and_says_that_a_whole_one_is_whole(folder: Path) -> None:
    doctor, path = shell_in(folder.parent), decisions_path(folder)
    assert "is writable, 1 record in it is whole" in doctor()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    assert f"FAIL  store: `{path}` is damaged: " in doctor()
    path.write_bytes(b"")
    assert f"FAIL  store: `{path}` is damaged: it has no `agents`" in doctor()


def test_doctor_says_that_a_record_is_of_a_newer_version(folder: Path) -> None:
    doctor, path = shell_in(folder.parent), decisions_path(folder)
    with closing(SqliteStore(path)) as store, store.transaction():
        store.run("UPDATE meta SET value = '999' WHERE key = 'schema_version'")
    assert f"FAIL  store: `{path}` has schema version `999`, of a newer version of this program" in doctor()


def test_doctor_fails_where_the_gate_would_refuse_to_open(folder: Path) -> None:
    doctor, key = shell_in(folder.parent), key_path(folder)
    key.write_bytes(b"short")
    key.chmod(0o600)
    assert f"FAIL  store: `{key}` is damaged: it has 5 bytes" in doctor()
    key.write_bytes(bytes(32))
    assert "is writable, 1 record in it is whole" in doctor()
    decisions_path(folder).unlink()
    assert f"FAIL  store: the record `{decisions_path(folder)}` is gone, but its key is there" in doctor()

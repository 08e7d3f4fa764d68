"""`sds backup` and `sds restore` as an operator sees them."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.host.paths import open_record, signer
from sds.kernel.registry import registry
from tests.cli.conftest import Shell
from tests.kernel.durable import contract

HERE = ("--gate", "claims")


@pytest.fixture
def sds(tmp_path: Path) -> Shell:
    with closing(open_record(tmp_path / "home" / "claims")) as store:
        registry.register(store, contract(), by="operator", now_ms=now_ms())
    signer(tmp_path / "home" / "claims")
    return Shell(tmp_path / "home")


def test_a_backup_says_whether_the_key_is_in_it_and_a_restore_what_is_to_be_done_next(
    sds: Shell, tmp_path: Path
) -> None:
    to, whole = tmp_path / "copy", tmp_path / "whole.tar"
    said = sds.ok("backup", "--to", str(to), *HERE).splitlines()
    assert said[0].startswith("claims: up to entry 3, of ")
    assert said[0].endswith(f", signed, in `{to}`")
    assert (
        "`kernel.key` is not in it: keep a copy elsewhere, because without the key no text can be read and nothing can be decided"
        == said[1]
    )
    said = sds.ok("backup", "--to", str(whole), "--with-key", *HERE).splitlines()
    assert "`kernel.key` is in it: anyone who has the backup can read the text of every case" == said[1]
    shutil.rmtree(sds.home / "claims")
    said = sds.ok("restore", "--from", str(to), *HERE).splitlines()
    assert (
        f"put `{sds.home}/claims/kernel.key` back, too: until then no text can be read and nothing can be decided"
        == said[1]
    )
    assert [
        "halts, suspensions, revocations and erasures since then are undone: repeat them first",
        "the record lacks the decisions since then; so that nothing is paid twice, do this now, in this order:",
        "  (PATH: the path of the definition of `claims`, because no gate of this name is installed)",
        "  sds recover --gate PATH",
        '  sds reconcile PATH --adopt --reason "restored"     # if the executor offers a statement',
        "  send the events since then again",
    ] == said[2:]
    assert 6 == len(sds.ok("restore", "--from", str(whole), *HERE).splitlines()) - 1
    sds.ok("ledger", "verify", *HERE)


def test_where_a_service_lives_both_say_what_becomes_of_what_is_its_own(sds: Shell, tmp_path: Path) -> None:
    key = sds.ok("keys", "add", "shop", "--role", "submit", "--gate", "claims").strip()
    said = sds.ok("backup", "--to", str(tmp_path / "copy"), *HERE).splitlines()
    assert "keys of callers and webhooks are not in it: they belong to the service, for all gates" == said[-1]
    shutil.rmtree(sds.home / "claims")
    said = sds.ok("restore", "--from", str(tmp_path / "copy"), *HERE).splitlines()
    assert (
        "keys of callers and webhooks are unchanged; answers that are not in this record are no longer given"
        == said[-1]
    )
    assert sds.ok("keys", "list").startswith("shop  submit  claims  made ")
    assert key not in "".join(said)


def test_what_cannot_be_is_refused_in_one_line_with_its_mend(sds: Shell, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    sds.ok("backup", "--to", str(to), *HERE)
    again = sds("backup", "--to", str(to), *HERE)
    assert (2, f"error: `{to}` already exists") == (again.returncode, again.stderr.splitlines()[0])
    absent = sds("restore", "--from", str(tmp_path / "absent"), "--gate", "other")
    assert not (sds.home / "other").exists()
    assert (2, f"error: `{tmp_path}/absent` is not a whole backup") == (
        absent.returncode,
        absent.stderr.splitlines()[0],
    )
    other = sds("restore", "--from", str(to), "--gate", "other")
    assert (2, False) == (other.returncode, (sds.home / "other").exists())
    (tmp_path / "torn.tar").write_bytes(b"no archive")
    torn = sds("restore", "--from", str(tmp_path / "torn.tar"), *HERE)
    assert (2, "mend:  name a folder or a .tar file that sds backup made") == (
        torn.returncode,
        torn.stderr.splitlines()[1],
    )
    (to / "decisions.db").write_bytes(b"")
    changed = sds("restore", "--from", str(to), *HERE)
    assert (1, f"error: `decisions.db` in `{to}` has changed since the backup") == (
        changed.returncode,
        changed.stderr.splitlines()[0],
    )


def test_a_restore_verifies_with_a_public_key_from_elsewhere(sds: Shell, tmp_path: Path) -> None:
    sds.ok("backup", "--to", str(tmp_path / "copy"), "--json", *HERE)
    public = shutil.copy(sds.home / "claims" / "ledger.pub", tmp_path)
    shutil.rmtree(sds.home / "claims")
    found = sds.json("restore", "--from", str(tmp_path / "copy"), "--public-key", str(public), "--json", *HERE)
    assert (False, 3) == (found["has_key"], found["head"]["idx"])

"""`sds keys` and `sds ledger`: signatures as an operator and an auditor see them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.host.paths import open_record, signer
from sds.kernel.registry import registry
from tests.cli.conftest import Shell
from tests.kernel.durable import contract
from tests.kernel.tampering import chained
from tests.stores.records import SqliteStranger

HERE = ("--gate", "claims")


@pytest.fixture
def sds(tmp_path: Path) -> Shell:
    """Return a shell in a home with the record of one gate, deployed twice, both entries signed."""
    with closing(open_record(tmp_path / "home" / "claims")) as store:
        registry.register(store, contract(), by="operator", now_ms=now_ms())
        registry.register(store, contract(("1.0.0", "1.1.0")), by="operator", now_ms=now_ms())
    signer(tmp_path / "home" / "claims")
    return Shell(tmp_path / "home")


def rewrite(sds: Shell) -> None:
    """Write the ledger anew from the start, with no checkpoint left."""
    with closing(sqlite3.connect(sds.home / "claims" / "decisions.db", isolation_level=None)) as db:
        stranger = SqliteStranger(db)
        stranger.execute("UPDATE ledger SET at_ms = at_ms - 1")
        chained(stranger)
        stranger.execute("DELETE FROM checkpoints")
        stranger.hide()


def test_a_ledger_rewritten_as_a_whole_is_found_with_the_keys_in_the_folder_and_they_are_named(sds: Shell) -> None:
    said = sds.ok("ledger", "verify", *HERE).splitlines()
    last = int(said[0].split()[0])
    assert f"signed up to entry {last}; verified with the keys in `{sds.home}/claims/kernel.key`" == said[1]
    assert "not detectable without --head: entries cut off at the end" == said[2]
    rewrite(sds)
    done = sds("ledger", "verify", *HERE)
    assert 1 == done.returncode
    assert f"entries 1 to {last}: none has a checkpoint, although signing had begun" in done.stdout


def test_an_auditor_needs_the_record_and_the_public_keys_alone(sds: Shell, tmp_path: Path) -> None:
    public = tmp_path / "handed-out.pub"
    shutil.copy(sds.home / "claims" / "ledger.pub", public)
    for name in ("kernel.key", "ledger.pub"):
        (sds.home / "claims" / name).unlink()
    found = json.loads(sds.ok("ledger", "verify", "--public-key", str(public), "--json", *HERE))
    assert (found["entries"], str(public)) == (found["signed"], found["public_key"])
    assert "verified with no key" in sds.ok("ledger", "verify", *HERE)
    rewrite(sds)
    assert "none has a checkpoint" in sds("ledger", "verify", "--public-key", str(public), *HERE).stdout
    refused = sds("ledger", "verify", "--public-key", str(sds.home / "claims" / "decisions.db"), *HERE)
    assert (2, "mend:  name a copy of a gate's `ledger.pub`") == (refused.returncode, refused.stderr.splitlines()[1])


def test_a_signed_head_is_kept_elsewhere_and_checked(sds: Shell, tmp_path: Path) -> None:
    kept, plain = sds.ok("ledger", "head", "--sign", *HERE).strip(), sds.ok("ledger", "head", *HERE).strip()
    assert kept.startswith(f"{plain}:")
    assert kept == sds.ok("ledger", "head", "--sign", *HERE).strip()
    sds.ok("ledger", "verify", "--head", plain, *HERE)
    assert "not detectable" not in sds.ok("ledger", "verify", "--head", kept, *HERE)
    forged = sds("ledger", "verify", "--head", kept[:-1] + ("0" if kept[-1] != "0" else "1"), *HERE)
    assert (1, "the given head: its signature does not match its key") == (
        forged.returncode,
        forged.stdout.splitlines()[0],
    )
    assert "is not a head" in sds("ledger", "verify", "--head", kept[:-1], *HERE).stderr
    shutil.rmtree(sds.home / "claims")
    with closing(open_record(sds.home / "claims")) as store:
        registry.register(store, contract(), by="operator", now_ms=now_ms())
    other = sds("ledger", "verify", "--head", kept, *HERE)
    assert "the given head: signed with another key" in other.stdout


def test_keys_are_shown_without_their_secrets_and_rotated_on_the_record(sds: Shell) -> None:
    before = sds.ok("keys", "show", *HERE).splitlines()
    assert ["orders", "ledger"] == [line.split()[0] for line in before[:2]]
    assert f"the ledger is signed since entry 1; verifiers need `{sds.home}/claims/ledger.pub`" == before[2]
    key = (sds.home / "claims" / "kernel.key").read_bytes()
    assert "error: a reason is needed" in sds("keys", "rotate", "--reason", "\u3164", *HERE).stderr
    assert key == (sds.home / "claims" / "kernel.key").read_bytes()
    said = sds.ok("keys", "rotate", "--reason", "once a year", *HERE)
    assert "orders: 2 keys; ledger: 2 keys, signing with " in said
    shown = json.loads(sds.ok("keys", "show", "--json", *HERE))
    assert ["orders", "orders", "ledger", "ledger"] == [each["signs"] for each in shown]
    assert before[1].split()[1] == shown[3]["key"]
    ring = json.loads((sds.home / "claims" / "kernel.key").read_bytes().split(b"\n", 1)[1])
    for secret in (ring["seed"], *(each["key"] for each in ring["orders"])):
        assert secret not in json.dumps(shown)
    assert "0 faults" in sds.ok("ledger", "verify", *HERE)


def test_a_lost_key_is_told_by_every_command_that_needs_it_and_the_way_forward_is_the_one_it_names(sds: Shell) -> None:
    key = sds.home / "claims" / "kernel.key"
    key.unlink()
    for command in (("keys", "show"), ("keys", "rotate", "--reason", "x"), ("ledger", "head", "--sign")):
        done = sds(*command, *HERE)
        assert (1, f"error: the key `{key}` is gone, but its record is there") == (
            done.returncode,
            done.stderr.splitlines()[0],
        )
        assert 'sds keys rotate --gate claims --lost --reason "..."' in done.stderr
    found = sds("doctor", "--model", "README.md").stdout
    assert f"FAIL  store: the key `{key}` is gone" in found
    assert "keys rotate --gate GATE" in found, "the check is of every record, not of the gate that was named"
    said = sds.ok("keys", "rotate", "--lost", "--reason", "the disk died", *HERE)
    assert "orders in flight that the lost key signed stay UNKNOWN" in said
    assert "0 faults" in sds.ok("ledger", "verify", *HERE)
    assert "1 record in it is whole" in sds("doctor", "--model", "README.md").stdout


def test_doctor_names_what_others_may_read_with_the_mend(sds: Shell) -> None:
    folder = sds.home / "claims"
    assert "1 record in it is whole" in sds("doctor", "--model", "README.md").stdout
    for path in (folder, folder / "decisions.db", folder / "kernel.key"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o040)
        said = sds("doctor", "--model", "README.md").stdout
        assert f"FAIL  store: users other than its owner have access to `{path}` (chmod -R go= {folder})" in said
        path.chmod(mode)
    (folder / "ledger.pub").chmod(0o644)  # for everybody
    assert "1 record in it is whole" in sds("doctor", "--model", "README.md").stdout


def test_doctor_says_that_a_ledger_is_not_what_was_signed(sds: Shell) -> None:
    rewrite(sds)
    assert "FAIL  store: the ledger differs from what was signed: " in sds("doctor", "--model", "README.md").stdout

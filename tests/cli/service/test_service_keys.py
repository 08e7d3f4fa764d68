"""`sds keys add`, `list`, `revoke`: as whoever runs the service sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sds.host.paths import open_record
from tests.cli.conftest import Shell


@pytest.fixture
def sds(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def test_a_key_is_printed_once_and_listed_without_it(sds: Shell) -> None:
    made = sds("keys", "add", "shop", "--role", "submit,read", "--gate", "refund", "--gate", "fraud")
    assert (0, "") == (made.returncode, made.stderr)
    assert re.fullmatch(r"sds_[A-Za-z0-9_-]{43}\n", made.stdout)
    assert 0 == sds("keys", "add", "people", "--role", "review", "--gate", "all").returncode
    listed = sds("keys", "list")
    shop, people = listed.stdout.splitlines()
    assert shop.startswith("shop  submit,read  refund,fraud  made ")
    assert people.startswith("people  review  all  made ")
    assert made.stdout.strip() not in listed.stdout


def test_a_gate_that_nobody_knows_is_refused_and_no_key_is_made(sds: Shell) -> None:
    refused = sds("keys", "add", "shop", "--role", "read", "--gate", "refund,refnd")
    assert (2, "") == (refused.returncode, refused.stdout)
    assert "error: there is no gate `refnd`\n" in refused.stderr
    assert (
        "mend:  the gates are: fraud, refund; for a gate of your own that was never opened, give its path\n"
        in refused.stderr
    )
    assert "[]" == sds("keys", "list", "--json").stdout.strip()


def test_a_gate_of_ones_own_is_known_by_its_path_and_by_its_record(sds: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "parking"
    sds.ok("new", "parking", "--folder", str(folder))
    sds.ok("keys", "add", "shop", "--role", "submit", "--gate", str(folder))
    open_record(sds.home / "parking").close()
    sds.ok("keys", "add", "desk", "--role", "review", "--gate", "parking")
    assert ["parking", "parking"] == [key["gates"][0] for key in json.loads(sds.ok("keys", "list", "--json"))]


def test_a_revoked_key_is_listed_as_that_and_its_name_is_not_given_again(sds: Shell) -> None:
    sds("keys", "add", "shop", "--role", "read", "--gate", "all")
    assert "shop: revoked\n" == sds("keys", "revoke", "shop").stdout
    assert "shop: was already revoked\n" == sds("keys", "revoke", "shop").stdout
    (key,) = json.loads(sds("keys", "list", "--json").stdout)
    assert {"name", "roles", "gates", "made", "revoked"} == set(key)
    assert key["revoked"]
    again = sds("keys", "add", "shop", "--role", "read", "--gate", "all")
    assert 2 == again.returncode
    assert "error: a key `shop` exists already, or existed and was revoked\n" in again.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("add", "shop", "--role", "admin", "--gate", "all"), "there is no role `admin`"),
        (("add", "a b", "--role", "read", "--gate", "all"), "`a b` cannot be the name of a key"),
        (("add", "shop", "--role", "read", "--gate", "Refund"), "there is no gate `Refund`"),
        (("add", "shop", "--role", "read"), "Missing option '--gate'"),
        (("revoke", "nobody"), "there is no key `nobody`"),
    ],
)
def test_what_is_no_key_is_refused_in_one_line(sds: Shell, args: tuple[str, ...], said: str) -> None:
    refused = sds("keys", *args)
    assert 2 == refused.returncode
    assert said in refused.stderr
    assert "mend:" in refused.stderr


def test_a_database_that_cannot_be_used_is_said_without_its_password(sds: Shell) -> None:
    refused = sds("keys", "list", "--store", "postgresql://someone:hunter2@127.0.0.1:1/none")
    assert 1 == refused.returncode
    assert "error: the service cannot connect to its database" in refused.stderr
    assert "hunter2" not in refused.stderr + refused.stdout


def test_a_file_that_cannot_be_used_as_the_database_is_named(sds: Shell) -> None:
    (sds.home / "service.db").mkdir(parents=True)
    refused = sds("keys", "list")
    assert (1, "error: the service's database failed: SQLITE_CANTOPEN") == (
        refused.returncode,
        refused.stderr.splitlines()[0],
    )
    assert "mend:  check that `service.db` in $SDS_HOME" in refused.stderr


def test_a_store_that_is_no_url_of_postgresql_is_refused(sds: Shell) -> None:
    refused = sds("keys", "list", "--store", "mysql://someone:hunter2@127.0.0.1/none")
    assert 2 == refused.returncode
    assert "error: the store must be a `postgresql://` URL" in refused.stderr
    assert "hunter2" not in refused.stderr


@pytest.mark.parametrize(
    "command",
    [("keys", "revoke"), ("webhooks", "remove"), ("keys", "add", "--role", "read", "--gate", "all")],
    ids=" ".join,
)
def test_a_name_that_is_no_utf_8_is_a_mistake_of_the_user(sds: Shell, command: tuple[str, ...]) -> None:
    refused = sds(*command, "caf\udce9")
    assert (2, "") == (refused.returncode, refused.stdout)
    assert "error: `caf\\udce9` is not text in UTF-8\nmend:  type the name" in refused.stderr

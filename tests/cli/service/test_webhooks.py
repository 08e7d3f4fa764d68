"""`sds webhooks`: endpoints are added, listed with what is undelivered, and removed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sds.service.database import open_database
from sds.service.operations.endpoints import endpoints, positions, write_failure
from tests.cli.conftest import Shell
from tests.proposers import Greedy
from tests.service.testbed import EVENT, opened_bed

URL = "https://shop.example/decided?token=url-token"


@pytest.fixture
def sds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A home whose gate `toll` has decided once."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SDS_STORE", raising=False)
    (tmp_path / "home").mkdir()
    with opened_bed(tmp_path / "home", Greedy("WAIVE")) as bed:
        bed.post()
    return Shell(tmp_path / "home")


def test_an_endpoint_is_added_with_a_secret_that_is_shown_once(sds: Shell) -> None:
    made = sds("webhooks", "add", URL, "--gate", "toll", "--name", "shop")
    assert (0, "") == (made.returncode, made.stderr)
    secret = re.search(r"secret \(shown this once\): (whsec_\S+)", made.stdout)
    assert secret is not None
    listed = sds("webhooks", "list")
    assert "shop  toll  shop.example  undelivered 0 final states\n" == listed.stdout
    assert secret[1] not in listed.stdout
    assert "url-token" not in listed.stdout


def test_before_the_first_start_it_says_how_to_begin(tmp_path: Path) -> None:
    done = Shell(tmp_path / "new")("webhooks", "add", URL, "--gate", "refund")
    assert (2, "mend:  start the service once: sds serve --gate refund") == (
        done.returncode,
        done.stderr.splitlines()[-1],
    )


def test_a_gate_may_be_named_by_its_path(sds: Shell) -> None:
    assert "shop  toll\n" in sds.ok("webhooks", "add", URL, "--gate", str(sds.home / "toll_gate"), "--name", "shop")


def test_what_is_undelivered_and_since_when_it_fails_is_listed(sds: Shell) -> None:
    sds("webhooks", "add", URL, "--gate", "toll", "--name", "shop")
    with opened_bed(sds.home, Greedy("WAIVE")) as bed:
        bed.service.stop_background()
        bed.post({**EVENT, "trip_id": "T-2"})
    database = open_database()
    (at,) = positions(database)
    write_failure(database, at, "HTTP_503", now_ms=1_800_000_000_000, next_at_ms=1)
    database.close()
    said = sds("webhooks", "list").stdout
    assert "undelivered 1 final state  failing since 2027-01-15T08:00:00.000+00:00: HTTP_503\n" in said
    (row,) = json.loads(sds("webhooks", "list", "--json").stdout)
    assert ("shop", 1, 1, "HTTP_503") == (row["name"], row["undelivered"], row["attempts"], row["failure"])


def test_a_secret_of_ones_own_comes_from_a_file_and_is_not_printed(sds: Shell, tmp_path: Path) -> None:
    secret = "whsec_" + "QUJD" * 8
    (tmp_path / "secret").write_text(f"{secret}\n")
    made = sds("webhooks", "add", URL, "--gate", "toll", "--name", "shop", "--secret-file", str(tmp_path / "secret"))
    assert (0, True) == (made.returncode, secret not in made.stdout + made.stderr)
    database = open_database()
    assert [secret] == [each.secret for each in endpoints(database)]
    database.close()
    weak = sds("webhooks", "add", URL, "--gate", "toll", "--secret-file", "-", stdin="hunter2\n")
    assert (2, True) == (weak.returncode, "hunter2" not in weak.stdout + weak.stderr)


def test_an_endpoint_is_removed_once(sds: Shell) -> None:
    sds("webhooks", "add", URL, "--gate", "toll", "--name", "shop")
    assert "shop: removed\n" == sds("webhooks", "remove", "shop").stdout
    assert "no webhooks\n" == sds("webhooks", "list").stderr
    assert 2 == sds("webhooks", "remove", "shop").returncode


REFUSED = (
    (("add", "http://shop.example/", "--gate", "toll"), "the URL of the endpoint must begin with https://"),
    (("add", URL, "--gate", "none"), "there is no record"),
    (("add", URL), "Missing option '--gate'"),
    (("add", URL, "--gate", "toll", "--name", "A B"), "`A B` cannot be the name of a webhook"),
    (
        ("add", URL, "--gate", "toll", "--secret-file", "/nonexistent"),
        "`/nonexistent` cannot be read: no such file or directory",
    ),
)


def test_what_is_no_endpoint_is_refused_in_one_line(sds: Shell) -> None:
    for args, said in REFUSED:
        refused = sds("webhooks", *args)
        assert 2 == refused.returncode
        assert said in refused.stderr
        assert "mend:" in refused.stderr

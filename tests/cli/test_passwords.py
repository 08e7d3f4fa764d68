"""No command prints a part of a password, however the address that holds it is written and wherever it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.kernel.storage.test_postgres_schema import SECRETS, TORN

TYPED = (
    "postgresql://ada:sekr@dock/pawl@127.0.0.1:1/sds",
    "postgresql://ada:sekr dock@127.0.0.1:1/sds",
    "postgresql://ada@127.0.0.1:1/sds?password=sekr dock",
    "host=127.0.0.1 port=1 user=ada password='sekr dock'",
    "mysql://ada:sekr@127.0.0.1/sds",
)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    return Cli(capsys, monkeypatch, tmp_path)


def silent(done: tuple[int, str, str]) -> None:
    code, out, err = done
    assert code, out
    assert [] == [each for each in SECRETS if each in out + err.replace("password=***", "")]


@pytest.mark.parametrize("url", [*TORN, *TYPED[:4:3]])
def test_of_a_store_that_cannot_be_read(cli: Cli, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    silent(cli("keys", "list", "--store", url))
    silent(cli("record", "move", "--to", url, "--reason", "r"))
    monkeypatch.setenv("SDS_STORE", url)
    silent(cli("flows"))
    silent(cli("flows", "--gate", "refund", "--json"))
    silent(cli("serve", "--gate", "refund"))
    silent(cli("backup", "--gate", "refund", "--to", "none.backup"))


def test_the_example_of_an_address_stays_whole(cli: Cli) -> None:
    assert "mend:  postgresql://USER@HOST/DATABASE\n" in cli("record", "move", "--to", "mysql://a", "--reason", "r")[2]


def test_of_a_store_that_doctor_cannot_read(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDS_STORE", TORN[0])
    code, out, err = cli("doctor", "--gate", "refund")
    silent((code, out, err))
    assert "FAIL  store: the URL of the store cannot be read" in out


@pytest.mark.parametrize("typed", TYPED)
def test_of_an_address_that_is_typed_in_a_wrong_place(cli: Cli, typed: str) -> None:
    silent(cli("flows", typed))
    silent(cli("flows", "--gate", typed))
    silent(cli("run", typed))
    silent(cli("models", "show", typed))
    silent(cli("contracts", "check", typed))
    silent(cli("decide", "refund", "--event", typed))
    silent(cli("serve", "--gate", "refund", "--engines", typed))
    silent(cli(typed))
    silent(cli("webhooks", "add", typed.replace("postgresql", "https"), "--gate", "refund"))

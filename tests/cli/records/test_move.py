"""`sds record move`: as an operator sees it, from halting to going on."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.host.paths import open_record, signer
from sds.kernel.registry import registry
from tests.cli.conftest import Shell
from tests.kernel.durable import contract
from tests.stores.server import fresh_schema, own_database, server_url

WHY = ("--reason", "more machines")


@pytest.fixture
def gate() -> str:
    """The name of a gate that no other test has: its schema would be the same."""
    return f"g{fresh_schema()}"


@pytest.fixture
def sds(tmp_path: Path, gate: str) -> Shell:
    with closing(open_record(tmp_path / "home" / gate)) as store:
        registry.register(store, contract(), by="operator", now_ms=now_ms())
    signer(tmp_path / "home" / gate)
    return Shell(tmp_path / "home")


def test_a_gate_is_halted_moved_and_resumed_elsewhere(sds: Shell, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("--gate", gate)
    refused = sds("record", "move", "--to", server_url(), *WHY, *here)
    assert (2, f'mend:  sds halt --gate {gate} --reason "..."') == (refused.returncode, refused.stderr.splitlines()[1])
    sds.ok("halt", *here, *WHY)
    moved = json.loads(sds.ok("record", "move", "--to", server_url(), "--json", *WHY, *here))
    assert moved["to"].endswith(f", schema sds_{gate}")
    monkeypatch.setenv("SDS_STORE", server_url())
    verified = json.loads(sds.ok("ledger", "verify", "--head", moved["head"], "--json", *here))
    assert moved["head"] == verified["head"]
    sds.ok("resume", *here, *WHY)
    assert "claims-agent" in sds.ok("agents", "list", *here)
    monkeypatch.delenv("SDS_STORE")
    assert "halted by an operator" in sds.ok("agents", "list", *here)


def test_what_is_no_place_for_a_record_is_refused(sds: Shell, gate: str) -> None:
    refused = sds("record", "move", "--to", "mysql://x", *WHY, "--gate", gate)
    assert (2, "error: --to is neither `sqlite` nor the address of a PostgreSQL") == (
        refused.returncode,
        refused.stderr.splitlines()[0],
    )


def test_doctor_says_where_the_records_lie_that_it_has_read(
    sds: Shell, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sds.ok("halt", "--gate", gate, *WHY)
    with own_database() as url:  # doctor reads every record there
        sds.ok("record", "move", "--to", url, *WHY, "--gate", gate)
        monkeypatch.setenv("SDS_STORE", url)
        (line,) = [each for each in sds("doctor", "--model", "README.md").stdout.splitlines() if "store: " in each]
    assert f"`{sds.home}` is writable for keys and logs, " in line
    assert "1 record in PostgreSQL is whole" in line

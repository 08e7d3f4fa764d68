"""`sds sandbox-gateway`: what keeps it from starting is said in one line. What it does: tests/executors/test_sandbox.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(capsys, monkeypatch, tmp_path)


def test_a_port_in_use_a_fault_that_is_none_and_a_token_that_is_missing_are_said_in_one_line(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert (1, f"error: the gateway cannot listen on port {port}") == start(cli, "--port", port)
    assert (2, "error: `lose=1` is no fault") == start(cli, "--faults", "lose=1")
    assert (2, "error: `none` cannot be read: no such file or directory") == start(cli, "--token-file", "none")
    Path("accents").write_text("é")
    assert (2, "error: `accents` does not hold a token") == start(cli, "--token-file", "accents")
    Path("empty").write_text(" ")
    assert (2, "error: `empty` does not hold a token") == start(cli, "--token-file", "empty")
    Path("gateway.db").write_text("no database, whatever it is called: it is longer than a header" * 99)
    assert (2, "error: the gateway cannot use `gateway.db`") == start(cli)
    assert (2, "error: the gateway cannot use `none/of.db`") == start(cli, "--file", "none/of.db")


def start(cli: Cli, *options: str) -> tuple[int, str]:
    code, _, said = cli("sandbox-gateway", *options)
    line, mend = said.splitlines()
    assert mend.startswith("mend:  ")
    return code, line.partition(", or given")[0].rpartition(": ")[
        0
    ] if "the gateway cannot" in line else line.partition(",")[0]

"""`sds serve`: what it refuses to begin with, and that it serves, with several processes, until it is told to stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import httpx2
import pytest

from sds.service.server import workers
from tests.cli.conftest import ROOT, Shell


@pytest.fixture
def sds(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def test_without_a_key_it_says_which_command_makes_one(sds: Shell) -> None:
    refused = sds("serve", "--gate", "refund")
    assert 2 == refused.returncode
    assert "error: there is no valid key, so no request would be answered\n" in refused.stderr
    assert (
        "sds keys add NAME --role submit,read --gate all; or, for this machine only: sds serve --gate refund --dev"
        in (refused.stderr)
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])  # noqa: S104  what is refused
def test_dev_is_for_this_machine_alone(sds: Shell, host: str) -> None:
    refused = sds("serve", "--gate", "refund", "--dev", "--host", host)
    assert 2 == refused.returncode
    assert f"error: --dev serves only this machine, not `{host}`\n" in refused.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gate", "nothing"), "there is no gate `nothing`"),
        (("--gate", "refund", "--gate", "refund"), "the gate `refund` is named twice"),
        (("--gate", "refund", "--engines", "nowhere.yaml"), "nowhere.yaml"),
        (("--gate", "refund", "--rate", "inf"), "Invalid value for '--rate'"),
        ((), "Missing option '--gate'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(sds: Shell, args: tuple[str, ...], said: str) -> None:
    refused = sds("serve", "--dev", "--port", "0", *args)
    assert 2 == refused.returncode
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_port_that_is_taken_is_said(sds: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = sds("serve", "--gate", "refund", "--dev", "--port", str(port))
    assert 1 == refused.returncode
    assert f"error: the service cannot listen on `127.0.0.1:{port}`: address already in use\n" in refused.stderr
    assert "mend:  choose another port with --port\n" in refused.stderr


@contextmanager
def served(home: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Serve the refund gate, which needs no model with the readers that came with it; give the process, its address and a key."""
    command = [sys.executable, "-m", "sds.cli.app", "serve", "--gate", "refund", "--dev", "--port", "0", *args]
    environ = {**os.environ, "SDS_HOME": str(home), "SDS_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline() + process.stderr.readline()
        found = re.search(r"serving refund at (\S+)\nkey \(until this ends\): (\S+)\n", said)
        assert found, said + process.communicate()[1]
        yield process, found[1], found[2]
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _serving(process: subprocess.Popen[str]) -> list[int]:
    """Return the workers: the children that multiprocessing's own helper is none of."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"resource_tracker" not in _command(pid)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it was reaped since
        return b""


def _wait_for(condition: Callable[[], bool], within_s: float = 60) -> bool:
    until_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.1)
    return condition()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for workers under /proc")
@pytest.mark.timeout(240)
def test_workers_share_one_socket_who_dies_is_replaced_and_sigterm_ends_all_with_0(sds: Shell) -> None:
    with served(sds.home, "--workers", "2", "--drain-s", "1") as (process, address, key):
        asked = {"Authorization": f"Bearer {key}"}
        assert 200 == httpx2.get(f"{address}/v1/gates", headers=asked, timeout=30).status_code
        first = _serving(process)
        assert 2 == len(first)
        os.kill(first[0], signal.SIGKILL)
        assert _wait_for(lambda: len(now := _serving(process)) == 2 and first[0] not in now)
        assert 200 == httpx2.get(f"{address}/v1/gates", headers=asked, timeout=30).status_code
        ended = _serving(process)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(60)
        assert not any(_runs(pid) for pid in ended)


def test_a_worker_whose_parent_is_gone_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))
    lifeline, held = Pipe(duplex=False)
    held.close()
    workers.end_with(lifeline)
    assert [(os.getpid(), signal.SIGTERM)] == sent


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # nobody reaped it
    except OSError:
        return False

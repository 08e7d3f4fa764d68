"""A machine that gives no more files or threads, and signals of people and supervisors: what came in is decided all the same."""

from __future__ import annotations

import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.service.operations.waiting import wait_until
from tests.service.server.driver import asked, driven
from tests.service.testbed import EVENT

pytestmark = pytest.mark.timeout(90)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit (util-linux) is not installed")
def test_silent_clients_do_not_take_all_files_that_a_process_may_open(home: Path) -> None:
    (home / "let-go").touch()
    with driven(home, drain_s=60, files_max=64) as (_, address):
        url = urlsplit(address)
        silent = [socket.create_connection((url.hostname or "", url.port or 0)) for _ in range(100)]
        for number in range(3):
            assert 200 == asked(address, {**EVENT, "trip_id": f"T-{number}"}).status_code
        for each in silent:
            each.close()


def test_a_terminal_that_hangs_up_and_whoever_asks_twice_end_nothing_that_is_under_way(home: Path) -> None:
    with driven(home, drain_s=60) as (process, address), ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, address, EVENT)
        wait_until((home / "entered").exists)
        for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(each)
        (home / "let-go").touch()
        assert (200, "WAIVE") == (first.result(20).status_code, first.result().json()["action"])
        assert 0 == process.wait(20)

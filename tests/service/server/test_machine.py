"""A machine that gives no more files or threads, and signals of people and supervisors: what came in is decided all the same."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from sds.kernel.errors import WorldError
from sds.service import callers
from sds.service.operations import Operations
from sds.service.operations.background import Background
from sds.service.routes import submitting
from sds.service.server.serving import bound, serve
from sds.service.settings import ServiceSettings
from tests.gates.own import GATE, written
from tests.proposers import Greedy
from tests.service.operations.waiting import wait_until
from tests.service.server.driver import asked, driven
from tests.service.testbed import EVENT, Bed, check

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


def test_where_no_thread_can_be_started_a_request_for_a_decision_may_be_sent_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        for module in (callers, submitting):
            full.setattr(module, "run_in_threadpool", none_left)
        assert check(bed.post(), 503, "UNAVAILABLE")["retryable"]
        assert check(bed.client.get("/v1/gates"), 503, "UNAVAILABLE")["retryable"]
        check(bed.client.put("/v1/halt", json={"halted": True, "reason": "r"}), 500, "INTERNAL")
    assert 0 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
    assert 200 == bed.post().status_code


def test_who_cannot_start_for_want_of_threads_says_so_and_leaves_none(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, iter((True, True, False))

    def limited(thread: threading.Thread) -> None:
        if not next(left, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    bed.service.stop_background()
    again = Operations(bed.service)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", limited)
        with pytest.raises(WorldError, match="no thread can be started"):
            again.background.start()
    assert not [each for each in threading.enumerate() if each.name in ("sds-look", "sds-sample")]


def test_a_service_that_does_not_start_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: Background) -> NoReturn:
        raise WorldError("no thread can be started", hint="raise the limits")

    monkeypatch.setattr(Background, "start", none_left)
    settings = ServiceSettings(gates=(str(written(home / "toll_gate", GATE)),))
    with bound("127.0.0.1", 0) as listener, pytest.raises(WorldError, match="no thread can be started"):
        serve(settings, listener, lambda: None, open_model=lambda _: Greedy("WAIVE"))


def test_a_terminal_that_hangs_up_and_whoever_asks_twice_end_nothing_that_is_under_way(home: Path) -> None:
    with driven(home, drain_s=60) as (process, address), ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, address, EVENT)
        wait_until((home / "entered").exists)
        for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(each)
        (home / "let-go").touch()
        assert (200, "WAIVE") == (first.result(20).status_code, first.result().json()["action"])
        assert 0 == process.wait(20)

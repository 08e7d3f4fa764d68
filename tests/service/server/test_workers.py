"""Several processes behind one socket: who cannot start again hurts none that serves."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.errors import SdsError
from sds.service.server import workers
from sds.service.server.workers import RESTART_S_MAX, Supervisor, Worker
from sds.service.settings import ServiceSettings
from tests.service.operations.waiting import wait_until
from tests.service.server.children import closes, work


def serving(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("serves-")) for path in folder.glob("serves-*")}


def run(folder: Path, then: Callable[[], object]) -> None:
    """Keep two workers until what is done once they are announced has ended."""
    threads = list[threading.Thread]()
    failed = list[BaseException]()

    def act() -> None:
        try:
            then()
        except BaseException as error:  # noqa: BLE001  told in the thread of the test
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    def announced() -> None:
        threads.append(threading.Thread(target=act))
        threads[0].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = ServiceSettings(gates=(str(folder),), workers=2, drain_s=0.0)
        Supervisor(settings, listener, announced, work).run()
    for each in threads:
        each.join()
    assert [] == failed


@pytest.mark.timeout(180)
def test_a_replacement_that_cannot_start_is_tried_again_after_growing_pauses_and_the_others_serve_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = list[tuple[str, Any]]()
    monkeypatch.setattr(workers, "log", lambda event, facts: logged.append((event, facts)))
    monkeypatch.setattr(workers, "RESTART_S", 0.1)

    def lose_one() -> None:
        first, second = serving(tmp_path)
        (tmp_path / "broken").touch()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: 3 <= len([event for event, _ in logged if event == "service.worker_failed"]))
        os.kill(second, 0)  # it is there
        assert {first, second} == serving(tmp_path)
        (tmp_path / "broken").unlink()
        wait_until(lambda: 3 == len(serving(tmp_path)))

    run(tmp_path, lose_one)
    told = [facts for event, facts in logged if event == "service.worker_failed"]
    assert [0.1, 0.2, 0.4] == [facts["again_after_s"] for facts in told[:3]]
    assert {"the model is gone"} == {facts["why"] for facts in told}


@pytest.mark.timeout(180)
def test_a_machine_that_has_no_process_to_give_ends_none_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, begin, none_left = list[Any](), Supervisor._begun, threading.Event()
    monkeypatch.setattr(workers, "log", lambda event, facts: logged.append(facts | {"event": event}))
    monkeypatch.setattr(workers, "RESTART_S", 0.1)

    def begun(supervisor: Supervisor) -> Worker:
        if none_left.is_set():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return begin(supervisor)

    monkeypatch.setattr(Supervisor, "_begun", begun)

    def lose_one() -> None:
        first, second = serving(tmp_path)
        none_left.set()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: 2 <= len([each for each in logged if each["event"] == "service.worker_failed"]))
        os.kill(second, 0)  # it is there
        none_left.clear()
        wait_until(lambda: 3 == len(serving(tmp_path)))

    run(tmp_path, lose_one)
    told = {each["why"] for each in logged if each["event"] == "service.worker_failed"}
    assert {"the system starts no process: resource temporarily unavailable"} == told


def test_no_connection_is_taken_that_no_worker_accepts(tmp_path: Path) -> None:
    """Else a balancer's request waits while the workers close, and is then reset."""
    errors = list[int]()

    def act(port: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            wait_until(lambda: 2 == len([*tmp_path.glob("closed-*")]))
            with socket.socket() as late:
                errors.append(late.connect_ex(("127.0.0.1", port)))
        finally:
            (tmp_path / "go").touch()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = ServiceSettings(gates=(str(tmp_path),), workers=2)
        acting = threading.Thread(target=act, args=(listener.getsockname()[1],))
        Supervisor(settings, listener, acting.start, closes).run()
        acting.join()
    assert [errno.ECONNREFUSED] == errors


def test_the_pause_before_another_is_tried_has_a_limit() -> None:
    assert workers.restart_pause_s(0) == 1.0
    assert workers.restart_pause_s(10_000) == RESTART_S_MAX == 60.0


@pytest.mark.timeout(60)
def test_who_cannot_start_at_first_ends_them_all_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(SdsError, match="the model is gone") as caught:
        run(tmp_path, lambda: None)
    assert "put it back" == caught.value.hint


def test_an_interrupt_of_the_terminal_reaches_no_worker_not_even_one_that_is_being_loaded(tmp_path: Path) -> None:
    """Python would end it with a traceback; what is to end, the parent says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Worker(ServiceSettings(gates=(str(tmp_path),)), listener, work)
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGINT)
        try:
            wait_until(lambda: worker.dead or bool(serving(tmp_path)))
            assert not worker.dead
        finally:
            worker.process.kill()
            worker.process.join()
            worker.close()

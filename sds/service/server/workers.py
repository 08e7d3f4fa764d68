"""Several processes that serve on one socket; each opens gates, engines and database of its own.

Whoever dies is replaced; whoever cannot start ends them all. When the parent is gone, its children drain and end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from sds.kernel.errors import SdsError
from sds.service.operations.metrics import forget_process, shared_values
from sds.service.server.serving import LAST_ANSWERS_S, log, serve
from sds.service.settings import ServiceSettings

WORKERS_MAX = 64
POLL_S = 0.2
REPLACED_AFTER_S = 1.0
CLOSING_S = 10.0  # beside `drain_s`: to close files, models and connections

_spawn = multiprocessing.get_context("spawn")


class Worker:
    """One child. It has the reading end of `lifeline`: when the parent dies, that ends, and the child drains."""

    def __init__(self, settings: ServiceSettings, listener: socket.socket) -> None:
        lifeline, self._held = _spawn.Pipe(duplex=False)
        self.said, says = _spawn.Pipe(duplex=False)
        self.started = False
        self.began_s = time.monotonic()
        self.process: SpawnProcess = _spawn.Process(target=_work, args=(settings, listener, says, lifeline))
        self.process.start()
        lifeline.close()
        says.close()

    def hear(self) -> str:
        """Return why the child could not start, "" where it said nothing of the kind."""
        with suppress(EOFError, OSError):
            while self.said.poll():
                word = self.said.recv()
                self.started = self.started or word is None
                if word is not None:
                    return str(word)
        return ""

    def close(self) -> None:
        self._held.close()
        self.said.close()


def _work(settings: ServiceSettings, listener: socket.socket, says: Connection, lifeline: Connection) -> None:
    """Serve in a child. What it cannot start for is said to the parent in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all: the parent decides
    threading.Thread(target=end_with, args=(lifeline,), daemon=True).start()
    try:
        serve(settings, listener, lambda: says.send(None))
    except SdsError as error:
        with suppress(OSError):
            says.send(f"{error}\n{error.hint}")
        sys.exit(1)


def end_with(lifeline: Connection) -> None:
    """Have this process stop in order once whoever holds the other end is gone."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Keeps so many workers running until SIGTERM or SIGINT."""

    def __init__(self, settings: ServiceSettings, listener: socket.socket, started: Callable[[], None]) -> None:
        self._settings, self._listener, self._on_started = settings, listener, started
        self._stopping = False
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises SdsError where a worker cannot start."""
        with shared_values():
            self._run()

    def _run(self) -> None:
        before = {sig: signal.signal(sig, self._stop) for sig in (signal.SIGTERM, signal.SIGINT)}
        failure = ""
        try:
            self._workers = [Worker(self._settings, self._listener) for _ in range(self._settings.workers)]
            announced = False
            while not self._stopping and not failure:
                wait([each.process.sentinel for each in self._workers], POLL_S)
                failure = self._look()
                if not announced and all(each.started for each in self._workers):
                    self._on_started()
                    announced = True
        finally:
            self._end()
            for sig, handler in before.items():
                signal.signal(sig, handler)
        if failure:
            message, _, hint = failure.partition("\n")
            raise SdsError(message, hint=hint)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _look(self) -> str:
        """Replace who died; return why one could not start."""
        for place, worker in enumerate(self._workers):
            failure = worker.hear()
            if worker.process.exitcode is None:
                continue
            if failure or not worker.started:
                return failure or "a worker ended before it served"
            if self._stopping:
                break
            forget_process(worker.process.pid or 0)
            log("service.worker_died", {"pid": worker.process.pid, "exit": worker.process.exitcode})
            time.sleep(max(0.0, worker.began_s + REPLACED_AFTER_S - time.monotonic()))
            worker.close()
            self._workers[place] = Worker(self._settings, self._listener)
        return ""

    def _end(self) -> None:
        for each in self._workers:
            each.process.terminate()
        ends_s = time.monotonic() + self._settings.drain_s + LAST_ANSWERS_S + CLOSING_S
        for each in self._workers:
            each.process.join(max(0.0, ends_s - time.monotonic()))
            if each.process.exitcode is None:
                log("service.worker_killed", {"pid": each.process.pid})
                each.process.kill()
                each.process.join()
            each.close()

"""Several processes that serve on one socket; each opens gates, engines and database of its own.

Whoever dies is replaced. Whoever cannot start ends them all before the service was announced; after that, another is tried
again and again, after pauses that grow, and the others serve on. When the parent is gone, its children drain and end.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from sds.kernel.errors import SdsError, cause_of
from sds.service.operations.metrics import forget_process, shared_values
from sds.service.server.serving import LAST_ANSWERS_S, log, serve
from sds.service.settings import ServiceSettings

POLL_S = 0.2
REPLACED_AFTER_S = 1.0
RESTART_S, RESTART_S_MAX, DOUBLINGS_MAX = 1.0, 60.0, 6  # the pauses before one more is tried that could not start
CLOSING_S = 10.0  # beside `drain_s`: to close files, models and connections

_spawn = multiprocessing.get_context("spawn")


Work = Callable[[ServiceSettings, socket.socket, Connection, Connection], None]


class Worker:
    """One child. It has the reading end of `lifeline`: when the parent dies, that ends, and the child drains."""

    def __init__(self, settings: ServiceSettings, listener: socket.socket, work: Work) -> None:
        lifeline, self._held = _spawn.Pipe(duplex=False)
        self.said, says = _spawn.Pipe(duplex=False)
        self.started, self.failure = False, ""
        self.began_s = time.monotonic()
        self.next_s: float | None = None  # when it is replaced, once it is known to be dead
        self.process: SpawnProcess = _spawn.Process(target=work, args=(settings, listener, says, lifeline))
        resource_tracker.ensure_running()  # which a first child begins, and lets signals through again after that
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it knows to ignore it
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        lifeline.close()
        says.close()

    @property
    def dead(self) -> bool:
        return self.process.exitcode is not None

    def hear(self) -> None:
        """Take what the child has said: that it serves, or why it could not start."""
        with suppress(EOFError, OSError):
            while self.said.poll():
                word = self.said.recv()
                self.started = self.started or word is None
                self.failure = self.failure if word is None else str(word)

    def close(self) -> None:
        self._held.close()
        self.said.close()


def _work(settings: ServiceSettings, listener: socket.socket, says: Connection, lifeline: Connection) -> None:
    """Serve in a child. What it cannot start for is said to the parent in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all: the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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


def restart_pause_s(failures: int) -> float:
    """Return how long to wait before one more is tried, after so many in a row that could not start."""
    return min(RESTART_S_MAX, RESTART_S * 2.0 ** min(failures, DOUBLINGS_MAX))


class Supervisor:
    """Keeps so many workers running until SIGTERM or SIGINT. `work`: what each does in its process."""

    def __init__(
        self, settings: ServiceSettings, listener: socket.socket, started: Callable[[], None], work: Work = _work
    ) -> None:
        self._settings, self._listener, self._on_started, self._work = settings, listener, started, work
        self._stopping, self._announced = False, False
        self._workers: list[Worker] = []
        self._failures = [0] * settings.workers  # in a row, by place

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises SdsError where a worker cannot start before all have served once."""
        with shared_values():
            self._run()

    def _run(self) -> None:
        before = {sig: signal.signal(sig, self._stop) for sig in (signal.SIGTERM, signal.SIGINT)}
        failure = ""
        try:
            self._workers = [self._begun() for _ in range(self._settings.workers)]
            while not self._stopping and not failure:
                wait([each.process.sentinel for each in self._workers if not each.dead], POLL_S)
                failure = self._look()
                if not self._announced and all(each.started for each in self._workers):
                    self._on_started()
                    self._announced = True
        finally:
            self._end()
            for sig, handler in before.items():
                signal.signal(sig, handler)
        if failure:
            message, _, hint = failure.partition("\n")
            raise SdsError(message, hint=hint)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _begun(self) -> Worker:
        return Worker(self._settings, self._listener, self._work)

    def _look(self) -> str:
        """Replace who died; return why one could not start, before the service was announced."""
        for place, worker in enumerate(self._workers):
            dead = worker.dead
            worker.hear()  # after that: what it said before it died is heard
            if not dead:
                self._failures[place] = 0 if worker.started else self._failures[place]
                continue
            if worker.next_s is None:
                failure = worker.failure or ("" if worker.started else "a worker ended before it served")
                if failure and not self._announced:
                    return failure
                worker.next_s = self._next_s(place, failure)
            if not self._stopping and time.monotonic() >= worker.next_s:
                self._replace(place)
        return ""

    def _replace(self, place: int) -> None:
        """Begin another in the place of one that is dead; where the machine has no process to give, later."""
        dead = self._workers[place]
        try:
            self._workers[place] = self._begun()
        except OSError as error:
            dead.next_s = self._next_s(place, f"no process can be started: {cause_of(error)}")
        else:
            dead.close()

    def _next_s(self, place: int, failure: str) -> float:
        """Log that a worker is dead; return when it is to be replaced, by `time.monotonic`."""
        worker = self._workers[place]
        forget_process(worker.process.pid or 0)
        facts = {"pid": worker.process.pid, "exit": worker.process.exitcode}
        if not failure:
            log("service.worker_died", facts)
            return worker.began_s + REPLACED_AFTER_S
        pause_s = restart_pause_s(self._failures[place])
        self._failures[place] += 1
        log("service.worker_failed", {**facts, "why": failure.partition("\n")[0], "again_after_s": pause_s})
        return time.monotonic() + pause_s

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

"""Serve with several worker processes on one socket. Each opens its own gates, engines and database.

A worker that dies is replaced. One that cannot start ends them all, unless all have served once: after that another is
tried after growing pauses, while the others go on serving. When the parent process is gone, the workers drain and end.
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
from sds.service.server.serving import LAST_ANSWERS_S, hang_up, log, serve
from sds.service.settings import ServiceSettings

POLL_S = 0.2
REPLACED_AFTER_S = 1.0
RESTART_S, RESTART_S_MAX, DOUBLINGS_MAX = 1.0, 60.0, 6  # the pauses between attempts to start a worker
CLOSING_S = 10.0  # after `drain_s` and `LAST_ANSWERS_S`: for closing files, models and connections

_spawn = multiprocessing.get_context("spawn")


Work = Callable[[ServiceSettings, socket.socket, Connection, Connection], None]


class Worker:
    """One child process. It reads from a pipe, `lifeline`, that ends when the parent dies: then the child drains."""

    def __init__(self, settings: ServiceSettings, listener: socket.socket, work: Work) -> None:
        lifeline, self._held = _spawn.Pipe(duplex=False)
        self.said, says = _spawn.Pipe(duplex=False)
        self.started, self.failure = False, ""
        self.began_s = time.monotonic()
        self.next_s: float | None = None  # when it is replaced, once it is known to be dead
        self.process: SpawnProcess = _spawn.Process(target=work, args=(settings, listener, says, lifeline))
        resource_tracker.ensure_running()  # else starting the first child starts it, which unblocks the signals again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the child until `_work` ignores it
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
        """Read the child's messages: that it serves, or why it could not start."""
        with suppress(EOFError, OSError):
            while self.said.poll():
                word = self.said.recv()
                self.started = self.started or word is None
                self.failure = self.failure if word is None else str(word)

    def close(self) -> None:
        self._held.close()
        self.said.close()


def _work(settings: ServiceSettings, listener: socket.socket, says: Connection, lifeline: Connection) -> None:
    """Serve in a child process. Where it cannot start, send the error and its hint to the parent, and exit with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to parent and children: the parent acts on it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=end_with, args=(lifeline,), daemon=True).start()
    try:
        serve(settings, listener, lambda: says.send(None))
    except SdsError as error:
        with suppress(OSError):
            says.send(f"{error}\n{error.hint}")
        sys.exit(1)


def end_with(lifeline: Connection) -> None:
    """Send SIGTERM to this process once the pipe's other end is closed. Blocks until then."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def restart_pause_s(failures: int) -> float:
    """Return the pause in seconds before the next attempt, after `failures` failed ones in a row."""
    return min(RESTART_S_MAX, RESTART_S * 2.0 ** min(failures, DOUBLINGS_MAX))


class Supervisor:
    """Keeps `settings.workers` workers running until SIGTERM, SIGINT or SIGHUP. `work`: what each runs in its process."""

    def __init__(
        self, settings: ServiceSettings, listener: socket.socket, started: Callable[[], None], work: Work = _work
    ) -> None:
        self._settings, self._listener, self._on_started, self._work = settings, listener, started, work
        self._stopping, self._announced = False, False
        self._workers: list[Worker] = []
        self._failures = [0] * settings.workers  # in a row, by place

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or SIGHUP. Raises SdsError where a worker cannot start before all have served once."""
        with shared_values():
            self._run()

    def _run(self) -> None:
        asks = (signal.SIGTERM, signal.SIGINT, *hang_up())
        before = {sig: signal.signal(sig, self._stop) for sig in asks}
        failure = ""
        try:
            for _ in range(self._settings.workers):
                self._workers.append(self._begun())
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
        """Replace dead workers; return why one could not start, where the service was not announced yet, else ""."""
        for place, worker in enumerate(self._workers):
            dead = worker.dead
            worker.hear()  # after reading `dead`, so that its last message is not missed
            if not dead:
                self._failures[place] = 0 if worker.started else self._failures[place]
                continue
            if worker.next_s is None:
                failure = worker.failure or ("" if worker.started else "a worker process ended before it served")
                if failure and not self._announced:
                    return failure
                worker.next_s = self._next_s(place, failure)
            if not self._stopping and time.monotonic() >= worker.next_s:
                self._replace(place)
        return ""

    def _replace(self, place: int) -> None:
        """Start a worker in the place of a dead one; where the system gives no process, try again later."""
        dead = self._workers[place]
        try:
            self._workers[place] = self._begun()
        except OSError as error:
            dead.next_s = self._next_s(place, f"the system starts no process: {cause_of(error)}")
        else:
            dead.close()

    def _next_s(self, place: int, failure: str) -> float:
        """Log that a worker is dead; return the `time.monotonic` at which it is to be replaced."""
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
        self._listener.close()  # else the system takes connections that no worker accepts once the last has closed its socket
        for each in self._workers:
            each.process.terminate()
        stops_s = self._settings.shutdown_delay_s + self._settings.drain_s
        ends_s = time.monotonic() + stops_s + LAST_ANSWERS_S + CLOSING_S
        for each in self._workers:
            each.process.join(max(0.0, ends_s - time.monotonic()))
            if each.process.exitcode is None:
                log("service.worker_killed", {"pid": each.process.pid})
                each.process.kill()
                each.process.join()
            each.close()

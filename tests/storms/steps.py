"""Count a process's I/O steps, and strike at the N-th one.

There is a step before and a step after each SQL statement on SQLite (of store, bank or accounts, BEGIN and COMMIT included),
each sync of a file, each rename and each link, and each exchange with PostgreSQL; and one once the statements of an exchange
are sent. The counter cannot be removed: use it in a child process.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Strike = Callable[[], object]
DEAD = 9  # the exit code of a process that was struck


def die() -> None:
    """End the process at once, as SIGKILL does: nothing is rolled back, flushed or closed."""
    os._exit(DEAD)


class Steps:
    """Counts the steps of all threads, and strikes at number `at`; 0: never. `last`: the step that was struck."""

    def __init__(self, at: int, strike: Strike = die) -> None:
        self._at, self._strike, self._lock = at, strike, threading.Lock()
        self.count, self.last = 0, ""

    def arm(self, at: int) -> None:
        """Restart the count, and strike at number `at`."""
        with self._lock:
            self.count, self._at = 0, at

    def step(self, what: str) -> None:
        with self._lock:
            self.count += 1
            struck = self.count == self._at
            self.last = what if struck else self.last
        if struck:
            self._strike()

    def around(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.step(f"before {what}")
            done = work(*given, **named)
            self.step(f"after {what}")
            return done

        return counted

    def installed(self) -> Steps:
        """Install the counter in this process, for good; return it."""
        _count_sqlite(self)
        _count_postgresql(self)
        os.fsync = self.around("sync", os.fsync)
        for name in ("replace", "rename", "hardlink_to"):
            setattr(Path, name, _method(self, name, getattr(Path, name)))
        return self


def _method(steps: Steps, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: object, *given: Any, **named: Any) -> Any:
        return steps.around(name, work)(self, *given, **named)

    return counted


def _count_sqlite(steps: Steps) -> None:
    connect = sqlite3.connect

    class Counted(sqlite3.Connection):
        def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
            steps.step(f"before {sql[:40]}")
            cursor = super().execute(sql, values)
            steps.step(f"after {sql[:40]}")
            return cursor

    def counted(*given: Any, **named: Any) -> sqlite3.Connection:
        return connect(*given, **{"factory": Counted, **named})

    sqlite3.connect = counted  # type: ignore[assignment]  # in a child, for all that opens a file there


def _count_postgresql(steps: Steps) -> None:
    if find_spec("psycopg") is None:
        return
    from sds.kernel.storage.postgres import pipelined

    pipelined.Connection.wait = _method(steps, "exchange", pipelined.Connection.wait)  # type: ignore[method-assign]
    send = pipelined.send

    def sent(connection: Any) -> Iterator[Any]:
        yield from send(connection)
        steps.step("after sending")

    pipelined.send = sent  # type: ignore[assignment]

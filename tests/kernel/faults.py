"""A counter of I/O steps that stops the process at the N-th: whatever is done after that raises, too.

A step is before or after a statement of SQLite, or a round trip to PostgreSQL: what goes along in one is done whole or not.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sds.kernel.storage.sqlite import BUSY_MS


class Closing(Protocol):
    """What a process holds open."""

    def close(self) -> None: ...


class Crash(BaseException):
    """The process is gone. Not an Exception: no program may handle it."""


@dataclass
class Faults:
    """Counts I/O steps and stops the process at step number `at`. `steps` is what was done, in order, and `done` how much
    that was: a round trip counts as the statements that go along in it.
    """

    at: int | None = None
    steps: list[str] = field(default_factory=list)
    done: int = 0
    dead: bool = False
    connections: list[Closing] = field(default_factory=list)

    def step(self, name: str, statements: int = 1) -> None:
        if not self.dead:
            self.steps.append(name)
            self.done += statements
            self.dead = len(self.steps) == self.at
        if self.dead:
            raise Crash(f"step {len(self.steps)}: {name}")

    def bury(self) -> None:
        """Let go of what the dead process held open, with nothing committed."""
        self.dead = True
        for db in self.connections:
            db.close()


class Failing(sqlite3.Connection):
    """A connection that asks before and after every statement whether the process still lives."""

    faults = Faults()

    def execute(self, sql: str, values: object = (), /) -> sqlite3.Cursor:
        self.faults.step(f"before {sql[:40]}")
        cursor = super().execute(sql, values)  # type: ignore[arg-type]  # passed on as it came
        self.faults.step(f"after {sql[:40]}")
        return cursor

    def close(self) -> None:
        """Close it, and roll back what was not committed: while a cursor is still about, SQLite would hold its lock."""
        with suppress(sqlite3.ProgrammingError):  # it is closed
            self.rollback()
        super().close()


@dataclass(frozen=True)
class FailingConnect:
    """Opens SQLite's files with faults; `tests.stores.opened` opens a record of PostgreSQL with them."""

    faults: Faults

    def __call__(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(
            path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False, factory=Failing
        )
        db.faults = self.faults
        self.faults.connections.append(db)
        return db


def failing(faults: Faults) -> FailingConnect:
    return FailingConnect(faults)


class WordlessError(Exception):
    """What a foreign library raises, and what raises again when it is asked what it says."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

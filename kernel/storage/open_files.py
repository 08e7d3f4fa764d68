"""Databases that SQLite has open in this process, or had open in the process that this one was forked from.

SQLite keeps its locks on a file in a table of the process, and POSIX keeps them for the process. A fork inherits the
table without the locks. It then reads and writes without any, and another process that closes the file deletes the log
that the fork writes to: what was committed is lost. So a fork must not open such a file a second time.
https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from sds.kernel.errors import UsageError

_open: WeakValueDictionary[int, OpenFile] = WeakValueDictionary()


class OpenFile:
    """A file with open connections, until `close` or until nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.file, self.process = _file(path), os.getpid()
        self.path = path.absolute()  # the process may change its folder
        _open[id(self)] = self

    def close(self) -> None:
        _open.pop(id(self), None)


def refuse_inherited(path: Path) -> None:
    """Raise UsageError for a file that was open when this process was forked, and that nothing has closed here."""
    with suppress(OSError):  # opening it will say so
        file = _file(path)
        for reference in _open.valuerefs():
            inherited = reference()
            if inherited is not None and inherited.process != os.getpid() and inherited.file == file:
                why = f"`{path}` was open when this process was forked, and cannot be opened safely in it"
                hint = "fork before a gate is opened, or close the gate first, or start the process by `spawn`"
                raise UsageError(why, reason_code="FORKED", hint=hint)


def _file(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino

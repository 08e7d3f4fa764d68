"""A service over sockets, from a thread of this process: for what only a socket shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.service.testbed import Bed


@contextmanager
def served(bed: Bed) -> Iterator[str]:
    """Serve an app from a thread on a port of its own; its life began with `bed.client`. Give its address."""
    server = uvicorn.Server(uvicorn.Config(bed.app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()

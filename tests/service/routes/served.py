"""An application on a real socket: what streams cannot be tested in process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.service.operations.waiting import wait_until


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application whose lifespan somebody else runs; yield its URL."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)

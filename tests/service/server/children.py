"""What children do in place of serving. This module loads no service: every child would take a second for it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from sds.service.settings import ServiceSettings


def work(settings: ServiceSettings, _listener: socket.socket, says: Connection, _lifeline: Connection) -> None:
    """Serve nothing, in a child, unless the folder that the settings name has a file `broken`: then it cannot start."""
    folder = Path(settings.gates[0])
    if (folder / "broken").exists():
        says.send("the model is gone\nput it back")
        sys.exit(1)
    (folder / f"serves-{os.getpid()}").touch()
    says.send(None)
    time.sleep(300)


def closes(settings: ServiceSettings, listener: socket.socket, says: Connection, _lifeline: Connection) -> None:
    """On SIGTERM close the socket, and end once the folder has a file `go`."""
    folder, told = Path(settings.gates[0]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    says.send(None)
    told.wait(60)
    listener.close()
    (folder / f"closed-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)

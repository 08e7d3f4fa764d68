"""The entry of the command line. It imports little, so that Ctrl-C during the other imports ends the process with one line."""

from __future__ import annotations

import signal

from sds.host import interrupt


def main() -> None:
    """Run `sds`."""
    signal.signal(signal.SIGINT, interrupt.end)
    from sds.cli import app  # noqa: PLC0415  imports everything else

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    finally:
        signal.signal(signal.SIGINT, interrupt.end)  # while the interpreter shuts down

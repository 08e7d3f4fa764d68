"""The entry of the command line. It imports little, so that Ctrl-C during the other imports just ends the process."""

from __future__ import annotations

import signal


def main() -> None:
    """Run `sds`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sds.cli import app  # noqa: PLC0415  imports everything else

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter shuts down

"""The entry of the command line. It imports little, so that Ctrl-C during the other imports just ends the process."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run `sds`."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from sds.cli import app  # noqa: PLC0415  imports everything else

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            app.main()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter shuts down
    except KeyboardInterrupt:  # it came where this or `app.main` begins or ends
        with suppress(OSError):
            os.write(2, b"interrupted\n")
        sys.exit(130)

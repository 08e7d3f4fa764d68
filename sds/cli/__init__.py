"""The command line's entry: light, so that Ctrl-C while everything else is imported ends the process quietly."""

from __future__ import annotations

import signal


def main() -> None:
    """Run `sds`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sds.cli import app  # noqa: PLC0415  everything else

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()

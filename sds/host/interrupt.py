"""Ctrl-C while a command loads: libraries would hold KeyboardInterrupt up, or lose it in their callbacks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130  # also what a shell shows of a process that the signal ended


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Have the signal itself end the process in a block; an open transaction is then as after a crash. Does nothing outside
    the main thread, or where the signal is handled otherwise.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

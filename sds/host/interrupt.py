"""Ctrl-C ends a command with one line and exit code 130, also while it is loading."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

EXIT_INTERRUPTED = 130
LINE = "interrupted"
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_ending = threading.RLock()  # of several threads the first ends the process


def end(*_: object) -> None:
    """End the process at once, with the line; usable as a signal handler. What holds a transaction is as after a crash."""
    _ending.acquire()
    with suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{LINE}\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process at Ctrl-C in a block, in which a library loads: it may return late, and KeyboardInterrupt is lost in
    its callbacks. Does nothing outside the main thread, or where the signal is handled otherwise.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    watcher = threading.Thread(target=_watch, args=(reads,), daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(before)
        os.close(writes)
        watcher.join()
        os.close(reads)


def _watch(reads: int) -> None:
    """End the process once the signal has come, also while the main thread is in a library. Returns at the end of the pipe."""
    while number := os.read(reads, 1):
        if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is end:
            end(signal.SIGINT, None)

"""The machine's clock, which commands and gates pass to all that needs the time; and the written form of a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from sds.kernel.canonical import in_words, one_line
from sds.kernel.errors import NOT_AS_WRITTEN, UsageError

AT_MS_MAX = 253_402_300_799_999  # the last millisecond of the year 9999


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def clock_given(now_ms: Callable[[], int]) -> Callable[[], int]:
    """Return a clock that gives whole ms since 1970 or raises UsageError: a ledger with other times fails to verify."""

    def checked() -> int:
        try:
            at_ms = now_ms()
        except Exception as error:
            raise UsageError(f"the clock `now_ms` failed: {one_line(in_words(error), 200)}") from error
        if type(at_ms) is int and 0 <= at_ms <= AT_MS_MAX:
            return at_ms
        message = f"the clock `now_ms` returned `{one_line(repr(at_ms), 40)}`"
        raise UsageError(message, hint="it must return whole milliseconds since 1970, as an `int`")

    return checked


def when(at_ms: int, timespec: str = "milliseconds") -> str:
    """Return a time of the record as ISO 8601 in UTC; a time outside the calendar as its number."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=timespec)
    except (OSError, *NOT_AS_WRITTEN):
        return f"{at_ms} ms"

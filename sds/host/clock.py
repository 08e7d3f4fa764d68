"""The machine's clock: what commands and gates pass to whatever needs the time, and how a time is written."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from sds.kernel.errors import NOT_AS_WRITTEN


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def when(at_ms: int, timespec: str = "milliseconds") -> str:
    """Return a time of the record as ISO 8601 in UTC; one that no calendar has, as it stands there."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=timespec)
    except (OSError, *NOT_AS_WRITTEN):
        return f"{at_ms} ms"

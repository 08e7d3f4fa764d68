"""Waiting for what others do."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S_MAX = 20.0


def wait_until(holds: Callable[[], object]) -> None:
    """Return once something holds; fail where it does not within `WAIT_S_MAX` seconds."""
    until_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)

"""The processor of this machine in words: results are compared only between equal ones."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def machine_name() -> str:
    """Return the architecture and the processor's own name."""
    return f"{platform.machine()} {_processor()}".strip()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

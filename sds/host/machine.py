"""This machine: its processor in words (results are compared only between equal ones), and which hosts name it."""

from __future__ import annotations

import os
import platform
from functools import cache
from ipaddress import ip_address
from pathlib import Path

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@cache
def machine_name() -> str:
    """Return the architecture and the processor's own name."""
    return f"{platform.machine()} {_processor()}".strip()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_loopback(host: str) -> bool:
    """Tell whether a host is a loopback name or address. A name that DNS would have to resolve is not."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

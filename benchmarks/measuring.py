"""What every benchmark says of itself, and how it sums up: machine, versions, percentiles."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from sds.machine import machine_name


def machine() -> dict[str, object]:
    """Return the day and what it ran on: processor, and the cores this process may use."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of these distributions, `not installed` where there is none."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def timed_us(call: Callable[[], object]) -> float:
    """Return how long one call took, in microseconds."""
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return n, p50, p95, p99 and max, in the values' own unit."""
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    found = {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}
    return {"n": len(values), **{name: round(value, 2) for name, value in found.items()}}

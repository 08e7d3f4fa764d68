"""What every benchmark reports beside its figures: the machine, the versions, and how a list of timings is summed up."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np


def machine() -> dict[str, object]:
    """Return where and when this was measured."""
    return {
        "machine": f"{platform.machine()} {_processor()}".strip(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def versions(*dists: str) -> dict[str, str]:
    """Return the version of Python and of each distribution; `not installed` where there is none."""
    return {"python": platform.python_version(), **{name: _version(name) for name in dists}}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return n, p50, p95, p99 and max, in the unit of the values. At least one is needed."""
    p50, p95, p99 = (round(float(p), 2) for p in np.percentile(values, [50, 95, 99]))
    return {"n": len(values), "p50": p50, "p95": p95, "p99": p99, "max": round(float(max(values)), 2)}


def _version(dist: str) -> str:
    try:
        return version(dist)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

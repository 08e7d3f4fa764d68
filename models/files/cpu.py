"""This machine's processor, from /proc/cpuinfo."""

from __future__ import annotations

import platform
from pathlib import Path

CPU_BYTES_MAX = 1 << 16
_FEATURES = ("amx", "avx", "f16c", "fma", "asimd", "bf16", "i8mm", "sve")  # what matters to products of matrices


def processor() -> tuple[str, str]:
    """Return its name, and those features that matter to products of matrices, by name, with spaces between."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(CPU_BYTES_MAX).splitlines()
    except OSError:
        return platform.processor() or platform.machine(), ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name", platform.machine()), " ".join(sorted(f for f in flags if f.startswith(_FEATURES)))


def cpu_features() -> frozenset[str]:
    return frozenset(processor()[1].split())

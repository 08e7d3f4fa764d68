"""The processor of this machine, as far as matrix products depend on it."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_BYTES_MAX = 1 << 16
_FEATURES = ("amx", "avx", "f16c", "fma", "asimd", "bf16", "i8mm", "sve")


def cpu() -> tuple[str, str]:
    """Return the processor's name, and its relevant features, sorted, separated by spaces."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(CPU_BYTES_MAX).splitlines()
    except OSError:
        return platform.processor() or platform.machine(), ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name", platform.machine()), " ".join(sorted(f for f in flags if f.startswith(_FEATURES)))


def cpu_features() -> set[str]:
    return set(cpu()[1].split())

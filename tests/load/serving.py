"""The service under load: its own process, started as an operator starts it, and its memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sds.benchmarks import service

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Served:
    """A running service: its address, a key with every role, and its first process's id."""

    host: str
    port: int
    key: str
    pid: int

    @property
    def memory_mib(self) -> float:
        """The resident memory of all its processes now; what they share counts once for each."""
        return sum(_resident_kib(pid) for pid in _with_children(self.pid)) / 1024


@contextmanager
def served(home: Path, gate: str, module: str) -> Iterator[Served]:
    """Run `sds serve` for a gate on a free port until the block ends. `module`: run in place of `sds`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with service.served(gate, home, ("-m", module, "serve"), PYTHONPATH=path) as started:
        yield Served(*started)


def _with_children(pid: int) -> list[int]:
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it ended meanwhile
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _resident_kib(pid: int) -> int:
    try:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    except (OSError, TypeError):
        return 0

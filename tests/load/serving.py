"""The service that is loaded: a process of its own, started as an operator starts it, and what it weighs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

ROOT = Path(__file__).parents[2]
STARTED_S_MAX, ENDED_S_MAX = 120.0, 60.0
RATE = "1000000"  # of one key: how often one may ask is not what is measured
_SERVING = re.compile(r"serving .* at (http://\S+)")
_KEY = re.compile(r"sds_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True)
class Served:
    """A running service: its address, a key for everything, its first process."""

    host: str
    port: int
    key: str
    process: subprocess.Popen[bytes]

    @property
    def memory_mib(self) -> float:
        """Return what all its processes hold in memory now (resident set; what they share counts once for each)."""
        return sum(_resident_kib(pid) for pid in _with_children(self.process.pid)) / 1024


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("SDS_HOME", "SDS_STORE")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**kept, "SDS_HOME": str(home), "PYTHONPATH": path}


@contextmanager
def served(home: Path, gate: str, module: str) -> Iterator[Served]:
    """Run `sds serve` for a gate on any free port of this machine until the block ends. `module`: what runs as `sds`."""
    command = [sys.executable, "-m", module, "serve", "--gate", gate, "--port", "0", "--rate", RATE, "--dev"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment(home), cwd=ROOT, stdout=said, stderr=said)
        try:
            address, key = _said(process, said.fileno())
            assert address.hostname is not None
            assert address.port is not None
            yield Served(address.hostname, address.port, key, process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDED_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _said(process: subprocess.Popen[bytes], said: int) -> tuple[SplitResult, str]:
    """Return the address and the key that a service says once it has started."""
    ends_s, text = time.monotonic() + STARTED_S_MAX, ""
    while time.monotonic() < ends_s:
        ended, text = process.poll() is not None, os.pread(said, 1 << 20, 0).decode()
        if (at := _SERVING.search(text)) and (key := _KEY.search(text)):
            return urlsplit(at[1]), key[0]
        if ended:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the service did not start: {text[-2_000:]}")


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

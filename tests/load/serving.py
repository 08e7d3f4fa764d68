"""The service that is loaded: a process of its own, started as an operator starts it, and what it weighs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
STARTED_S_MAX, ENDED_S_MAX = 120.0, 60.0
RATE = "1000000"  # of one key: how often one may ask is not what is measured
_SERVING = re.compile(r"serving .* at (http://\S+)")


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


def run(home: Path, *command: str) -> str:
    """Run `sds COMMAND` in a home, and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", "from sds.cli import main; main()", *command],
        env=environment(home), cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("SDS_HOME", "SDS_STORE")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**kept, "SDS_HOME": str(home), "PYTHONPATH": path}


@contextmanager
def served(home: Path, gate: str, module: Sequence[str], options: Sequence[str] = ()) -> Iterator[Served]:
    """Run `sds serve` for a gate on any free port of this machine until the block ends. `module`: how Python starts `sds`."""
    key = run(home, "keys", "add", "load", "--role", "submit,read", "--gate", "all").strip()
    command = [sys.executable, *module, "serve", "--gate", gate, "--port", "0", "--rate", RATE, *options]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment(home), cwd=ROOT, stdout=said, stderr=said)
        try:
            address = urlsplit(_address(process, said.fileno()))
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


def _address(process: subprocess.Popen[bytes], said: int) -> str:
    ends_s = time.monotonic() + STARTED_S_MAX
    while time.monotonic() < ends_s:
        text = os.pread(said, 1 << 20, 0).decode()
        if found := _SERVING.search(text):
            return found[1]
        if process.poll() is not None:
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

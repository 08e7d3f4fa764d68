"""`python -m tests.service.server.driver GATE DRAIN_S`: serves a gate that decides nothing until a test lets it go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from sds.service.callers import digest_of
from sds.service.server.serving import address_of, bound, serve
from sds.service.settings import ServiceSettings
from tests.gates.own import GATE, written
from tests.service.engines import HeldByFiles

KEY = "sds_" + "k" * 43


def main() -> None:
    gate, drain_s = Path(sys.argv[1]), float(sys.argv[2])
    settings = ServiceSettings(gates=(str(gate),), drain_s=drain_s, dev=True, dev_keys=(digest_of(KEY),))
    engine = HeldByFiles(gate.parent)
    with bound("127.0.0.1", 0) as listener:
        serve(settings, listener, lambda: print(address_of(listener), flush=True), open_model=lambda _: engine)


@contextmanager
def driven(home: Path, drain_s: float, *, files_max: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the toll gate in a process of its own; yield it and its address. `files_max`: how many it may have open."""
    written(home / "toll_gate", GATE)
    limited = ["prlimit", f"--nofile={files_max}"] if files_max else []
    command = [*limited, sys.executable, "-m", "tests.service.server.driver", str(home / "toll_gate"), str(drain_s)]
    environ = {**os.environ, "SDS_HOME": str(home)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, process.communicate()[1]
        yield process, address
    finally:
        process.kill()
        process.communicate()


def asked(address: str, event: dict[str, str]) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx2.post(f"{address}/v1/gates/toll/decisions", json=event, headers=headers, timeout=30)


if __name__ == "__main__":
    main()

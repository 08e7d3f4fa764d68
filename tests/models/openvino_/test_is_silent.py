"""OpenVINO tells its maker of every import, unless it is kept from it: nothing leaves the machine, nothing is noted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_CHILD = """
import sys

sent = []
TELLTALE = ("socket.", "urllib.", "os.fork", "os.posix_spawn", "subprocess.")
sys.addaudithook(lambda event, args: sent.append(event) if event.startswith(TELLTALE) else None)
from pathlib import Path
from sds.models.openvino_.backend import OpenvinoBackend

backend = OpenvinoBackend(Path(sys.argv[1]), dtype="fp32", threads=1, lengths=())
backend.forward_one([5, 6, 7])
backend.close()
print(sent)
"""


def test_loading_and_running_a_model_sends_nothing_and_leaves_nothing_at_home(
    tiny_path: Callable[[int], Path], tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    environment = {
        name: value for name, value in os.environ.items() if name != "CI"
    }  # there it would keep quiet anyway
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tiny_path(1))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment, "HOME": str(tmp_path)},
    )
    assert (0, "[]") == (done.returncode, done.stdout.strip()), done.stderr
    assert [] == list(tmp_path.iterdir())

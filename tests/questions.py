"""Run a benchmark in this process, as `sds bench QUESTION` does in another one."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from sds.benchmarks.lib import measuring
from sds.benchmarks.lib.packets import packets_where
from sds.kernel.decision.packet import DecisionPacket


def asked(module: ModuleType, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Run a question; return its document, and the lines that it printed before it."""
    said = io.StringIO()
    with patch("sys.argv", [module.__name__, *arguments]), contextlib.redirect_stdout(said):
        measuring.main(module.__doc__, module._options, module._run, module._show)
    *lines, last = said.getvalue().splitlines()
    found: dict[str, Any] = json.loads(last)
    return found, lines


def real_packets(folder: Path, count: int) -> list[DecisionPacket]:
    """Return the first `count` packets that leave the model a choice."""
    return packets_where(folder, count, lambda packet: len(packet.envelope.kinds) > 1)

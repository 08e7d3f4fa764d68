"""One engine in a process of its own, asked over a pipe: one JSON line for the request, one for the answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINE_BYTES_MAX = 1 << 20
CLOSE_TIMEOUT_S = 10.0


class PeerProcess:
    """Starts a driver and waits until its model is loaded; it idles between requests.

    `missing`: why its libraries are not there, or "". `failed`: why it did not start, died or ran out of time, or ""; from
    then on every request is answered with that error.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], *, log: Path, overlay: Path | None, timeout_s: float
    ) -> None:
        self.missing, self.failed, self.notes = "", "", ""
        self.versions: dict[str, str] = {}
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603  a module of ours
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(overlay),
            )
        started = self._answer(timeout_s)
        self.notes, self.versions = started.get("notes", ""), started.get("versions", {})
        if "missing" in started:
            self.missing = f"not installed ({started['missing']})"
        elif "error" in started:
            self.failed = started["error"]

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request; {"error": ...} where there is none."""
        if self.failed:
            return {"error": self.failed}
        try:
            self._pipe_in.write(json.dumps(request).encode() + b"\n")
            self._pipe_in.flush()
        except OSError:
            return self._fail("the process has ended")
        return self._answer(timeout_s)

    def close(self) -> None:
        """Kill the process; it keeps nothing."""
        self._process.kill()
        self._process.wait(CLOSE_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def _pipe_in(self) -> Any:
        return self._process.stdin

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        pipe: Any = self._process.stdout
        if not select.select([pipe], [], [], timeout_s)[0]:
            self._process.kill()
            return self._fail(f"no answer within {timeout_s:g} s")
        line = pipe.readline(LINE_BYTES_MAX)
        if not line.endswith(b"\n"):
            return self._fail(f"the process has ended: {_last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self, why: str) -> dict[str, Any]:
        self.failed = why
        return {"error": why}


def _environment(overlay: Path | None) -> dict[str, str]:
    """Return a peer's environment: the overlay, its own versions of libraries, comes first, and no CUDA card is visible."""
    before = [str(overlay.resolve())] if overlay is not None and overlay.is_dir() else []
    paths = [*before, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"

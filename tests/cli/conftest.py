"""One home for all command-line tests: the world is made once, the real model decides in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sds.cli import app

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shell:
    """Runs `sds` as a user would, in a process of its own, with its own home."""

    home: Path

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    def __call__(self, *args: str, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "SDS_HOME": str(home or self.home),
            "SDS_CACHE": str(self.cache),
            "COLUMNS": "200",
            "SDS_THREADS": "1",
        }
        command = [sys.executable, "-m", "sds.cli.app", *args]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False
        )

    def ok(self, *args: str, stdin: str = "") -> str:
        done = self(*args, stdin=stdin)
        assert 0 == done.returncode, done.stderr + done.stdout
        return done.stdout

    def json(self, *args: str, stdin: str = "") -> Any:
        return json.loads(self.ok(*args, stdin=stdin).splitlines()[-1])


@dataclass
class Cli:
    """Runs `sds` in this process: (exit code, standard output, standard error)."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    folder: Path

    def __call__(self, *args: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["sds", *args])
        with pytest.raises(SystemExit) as ended:
            app.main()
        said = self.capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def ok(self, *args: str) -> str:
        code, out, err = self(*args)
        assert 0 == code, err
        return out

    def json(self, *args: str) -> Any:
        return json.loads(self.ok(*args, "--json"))


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def report(shell: Shell) -> Any:
    """The report of one small run with the embedded model."""
    return shell.json("run", "refund", "--limit", "8", "--json")

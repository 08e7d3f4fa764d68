"""One home for all command-line tests: the world is made once, the real model decides in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from sds.cli import app

ROOT = Path(__file__).parents[2]


@contextmanager
def _written_to(number: int, file: IO[bytes], patched: pytest.MonkeyPatch) -> Iterator[None]:
    """Have what is written to standard output (1) or error (2) go to a file, that of processes begun meanwhile, too."""
    name = {1: "stdout", 2: "stderr"}[number]
    getattr(sys, name).flush()
    kept = os.dup(number)
    os.dup2(file.fileno(), number)
    with open(number, "w", encoding="utf-8", closefd=False) as stream:
        patched.setattr(sys, name, stream)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(kept, number)
            os.close(kept)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@dataclass(frozen=True)
class Shell:
    """Runs `sds` as a user would, with its own home: in this process, or in one of its own."""

    home: Path

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    def _settings(self, home: Path | None) -> dict[str, str]:
        named = {"SDS_HOME": str(home or self.home), "SDS_CACHE": str(self.cache)}
        return {**named, "COLUMNS": "200", "SDS_THREADS": "1", "NO_COLOR": "1"}

    def __call__(self, *args: str, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patched, TemporaryFile() as out, TemporaryFile() as err:
            for name, value in self._settings(home).items():
                patched.setenv(name, value)
            patched.chdir(ROOT)
            patched.setattr(sys, "argv", ["sds", *args])
            patched.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode())))
            with _written_to(1, out, patched), _written_to(2, err, patched), pytest.raises(SystemExit) as ended:
                app.main()
            code = ended.value.code or 0
            return subprocess.CompletedProcess(args, int(code), _text(out), _text(err))

    def process(self, *args: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run it in a process of its own: what is imported, and how it ends, is seen there alone."""
        command = [sys.executable, "-m", "sds.cli.app", *args]
        environment = {**os.environ, **self._settings(home)}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False
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

"""The reference pages say what the program does: neither can change without the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from sds.kernel import contract

ROOT = Path(__file__).parents[1]


def test_the_command_line_page_is_what_the_program_says_of_itself() -> None:
    command = [
        sys.executable,
        "-m",
        "typer",
        "sds.cli.app",
        "utils",
        "docs",
        "--name",
        "sds",
        "--title",
        "Command line",
    ]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=120).stdout
    assert said.strip() == (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").strip(), "run `make docs`"


def test_the_contract_page_names_every_field_of_a_contract() -> None:
    page = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    models = [m for m in vars(contract).values() if isinstance(m, type) and issubclass(m, BaseModel)]
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", page))))
    missing = {field for model in models for field in model.model_fields if field not in named}
    assert set() == missing


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[^`]*\.py)`", page))
    assert len(named) > 20
    assert set() == {name for name in named if not (ROOT / name).exists()}

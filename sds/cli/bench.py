"""`sds bench`: run one benchmark in a process of its own. Its last line is one JSON document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sds.cli.common import JsonFlag
from sds.kernel.errors import UsageError

QUESTIONS = ("kernel", "grammar")


def add_to(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    question: Annotated[str, typer.Argument(help=f"Which question: {', '.join(QUESTIONS)}.", metavar="QUESTION")],
    as_json: JsonFlag = False,
    page: Annotated[Path | None, typer.Option("--page", help="Write a Markdown page, too.", show_default=False)] = None,
) -> None:
    """Measure one thing, alone on this machine if you want figures to mean anything.

    Example: sds bench kernel --json
    """
    if question not in QUESTIONS:
        raise UsageError(f"there is no benchmark `{question}`", hint=f"one of: {', '.join(QUESTIONS)}")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise UsageError(f"`{page}` cannot be written", hint="name a file in a folder that is there")
    command = [sys.executable, "-m", f"sds.benchmarks.{question}", *(["--json"] if as_json else [])]
    command += ["--page", str(page)] if page else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603  our own module

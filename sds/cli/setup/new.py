"""`sds new`: write a new gate into a folder. It can decide its first event at once."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from sds.cli.common import written
from sds.cli.render import echo
from sds.definitions.definition import NAME
from sds.definitions.registry import installed
from sds.kernel.errors import UsageError, cause_of

TEMPLATE = Path(__file__).parents[2] / "gates" / "template"
FILES = {"contract.yaml": "contract.yaml", "gate.py": "gate.py", "test_gate.txt": "test_gate.py"}  # template: new gate
_ANYONE_WRITES = 0o002
CALLED, AGENT = "my_gate", "my-gate"  # the template's names of gate and agent


def new(
    name: Annotated[str, typer.Argument(help="The gate's name, in_lower_case.", metavar="NAME")],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="The folder to write. Default: ./NAME.", show_default=False, callback=written),
    ] = None,
) -> None:
    """Write a gate that runs. It has a contract, state in SQLite, an executor that does everything once, a queue, and tests.

    Example: sds new held_payments && sds run ./held_payments --limit 3
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"`{name}` is not the name of a gate", hint="write a name_in_lower_case")
    if name in installed():
        raise UsageError(f"an installed gate is already named `{name}`", hint="choose another name")
    into = folder or Path(name)
    try:
        _write(name, into)
    except OSError as error:
        raise UsageError(f"`{into}` cannot be written: {cause_of(error)}") from error
    echo(f"`{into}` holds {', '.join(FILES.values())}")
    where = shlex.quote(str(into) if into.is_absolute() else f"./{into}")
    echo(f"try it:   sds run {where} --limit 3")
    echo(f"check it: sds contracts check {where}; pytest {where}")


def _write(name: str, into: Path) -> None:
    """Write the files into a temporary folder, then rename it: all or nothing. Raises UsageError where `into` exists."""
    if os.path.lexists(into):
        raise UsageError(f"`{into}` already exists, and no file is overwritten", hint="choose another --folder")
    into.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=into.absolute().parent, prefix=f".{name}-") as temporary:
        made = Path(temporary) / name
        made.mkdir()
        for source, file in FILES.items():
            text = (TEMPLATE / source).read_text(encoding="utf-8")
            text = text.replace(CALLED, name).replace(AGENT, name.replace("_", "-"))
            (made / file).write_text(text, encoding="utf-8")
        for each in (made, *made.iterdir()):  # a contract that anyone can write is refused
            each.chmod(each.stat().st_mode & ~_ANYONE_WRITES)
        made.rename(into)

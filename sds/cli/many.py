"""Do one thing to many cases: their ids from arguments or a file, a line of report for each, one exit code for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sds.cli.common import named
from sds.cli.render import echo, plain, print_json
from sds.kernel.errors import SdsError, StoreError, UsageError, WorldError, cause_of

IDS_MAX = 10_000  # as many as `sds escalations list` lists
ID_BYTES_MAX = 1_024

IdsFile = Annotated[
    str | None,
    typer.Option(
        "--file", metavar="FILE", help="A file with one id a line; - reads standard input.", show_default=False
    ),
]
Report = tuple[Mapping[str, Any], str]  # of one case that was done: as JSON data, and as a line for people


def ids_of(given: Sequence[str] | None, file: str | None, what: str) -> list[str]:
    """Return the ids that were typed, then those of the file, each once. `what`: how to type one. Empty lines and lines
    that begin with # are left out. Raises UsageError where there is no id, one that is not UTF-8, or more than `IDS_MAX`.
    """
    lines = _read(file) if file is not None else []
    found = dict.fromkeys(
        [*map(named, given or ()), *(line for line in map(str.strip, lines) if line and line[0] != "#")]
    )
    if not found:
        raise UsageError("no id is given", hint=f"give {what}, or --file FILE with one id a line")
    if len(found) > IDS_MAX:
        raise UsageError(f"{len(found):,} ids are more than the {IDS_MAX:,} of one call", hint="split the file")
    return list(found)


def _read(file: str) -> list[str]:
    size = IDS_MAX * ID_BYTES_MAX
    try:
        if file == "-" and sys.stdin is None:
            raise UsageError("standard input is closed")
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as stream:
            raw = stream.read(size + 1)
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {cause_of(error)}") from error
    if len(raw) > size:
        raise UsageError(f"`{file}` is larger than {size:,} bytes", hint="split the file")
    try:
        return raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"`{file}` is not text in UTF-8", hint="save it as UTF-8") from error


AGAIN = "their lines say why; after a mend, run it again with the same ids: what is done is not done twice"


def for_each(
    ids: Sequence[str],
    act: Callable[[str], Report],
    *,
    as_json: bool,
    is_done: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    hint: str = AGAIN,
) -> None:
    """Do `act` for each id and print its report at once: one JSON object, or one line. One that is refused is reported and
    the others go on. Raises WorldError with `hint` at the end where some were refused, or are not done as `is_done` tells
    from their facts, and at once where the store itself fails.
    """
    undone = 0
    for each in ids:
        try:
            facts, line = act(each)
            undone += not is_done(facts)
        except SdsError as error:
            if isinstance(error, StoreError) and not error.dfid:
                raise
            undone += 1
            facts = {"id": each, "error": str(error), "reason_code": error.reason_code, "hint": error.hint}
            line = f"{each}  not done: {error}"
        if as_json:
            print_json(facts)
        else:
            echo(plain(line))
    if undone:
        raise WorldError(f"{undone:,} of {len(ids):,} were not done", hint=hint)

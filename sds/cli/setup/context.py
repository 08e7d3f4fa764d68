"""`sds artifacts` and `sds retention`: the reference texts that models read with their contract, and their removal."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, named, open_store, operator
from sds.cli.render import echo, print_either
from sds.host.clock import now_ms
from sds.host.input_files import read_text
from sds.kernel.context import artifacts as library
from sds.kernel.context import memory
from sds.kernel.context.artifacts import ARTIFACT_BYTES_MAX, Listed

ArtifactName = Annotated[str, typer.Argument(help="The artifact's name in contracts.", metavar="NAME", callback=named)]


def put(
    name: ArtifactName,
    file: Annotated[Path, typer.Argument(help="A file with the text, in UTF-8.", metavar="FILE")],
    reason: Reason,
    gate: GateOption = "refund",
) -> None:
    """Put a reference text in force. It replaces the last version of its name. The next decision reads it.

    Example: sds artifacts put fare_rules rules.txt --reason "winter timetable"
    """
    text = read_text(file, ARTIFACT_BYTES_MAX)
    with closing(open_store(gate)) as store:
        kept = library.put(store, name, text, who=operator(), reason=reason, now_ms=now_ms())
    echo(f"{kept.name}: version {kept.version}, sha256 {kept.sha256[:12]}")


def list_artifacts(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List the artifacts of a gate's record. Every version has a line.

    Example: sds artifacts list
    """
    with closing(open_store(gate)) as store:
        listed = library.listed(store)
    print_either(as_json, [asdict(one) for one in listed], map(_line, listed), none="no artifacts")


def _line(one: Listed) -> str:
    state = "in force" if one.ended_at_ms is None else "swept" if one.swept else "no longer in force"
    return f"{one.name}  version {one.version}  sha256 {one.sha256[:12]}  {state}"


def retire(name: ArtifactName, reason: Reason, gate: GateOption = "refund") -> None:
    """Take an artifact out of force. If a contract names it, every case of that contract then goes to a human.

    Example: sds artifacts retire fare_rules --reason "withdrawn by legal"
    """
    with closing(open_store(gate)) as store:
        library.retire(store, name, who=operator(), reason=reason, now_ms=now_ms())
    echo(f"{name}: no longer in force")


def sweep(reason: Reason, gate: GateOption = "refund") -> None:
    """Remove artifact texts past their retention. No contract's memory reaches back to them. Sealed rows stay.

    Example: sds retention sweep --reason "monthly"
    """
    with closing(open_store(gate)) as store:
        swept = memory.sweep(store, who=operator(), reason=reason, now_ms=now_ms())
    echo(f"{swept.artifacts} removed{', and more remain: run the command again' if swept.more else ''}")

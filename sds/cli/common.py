"""What several commands share: arguments, where things are, reading an event."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from sds.host.paths import GATES, decisions_path, gate_home, home, key_path, open_record
from sds.kernel.errors import NOT_AS_WRITTEN, EventError, ModelError, UsageError
from sds.kernel.flow.intake import EVENT_BYTES_MAX, in_utf8
from sds.kernel.identifiers import is_seen
from sds.kernel.storage.store import Store
from sds.models.protocol import BackendError

A_GOOD_EVENT = "sds events refund --limit 1 > event.json; sds ... --event event.json"
_GATE = re.compile(r"[a-z][a-z0-9_]{0,63}")

GateName = Annotated[str, typer.Argument(help="Which gate: refund.", metavar="GATE")]
GateOption = Annotated[str, typer.Option("--gate", help="Which gate.")]
EventFile = Annotated[str, typer.Option("--event", help="A JSON file with one event, or - for standard input.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the record.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else on standard output.")]
GgufPath = Annotated[
    Path | None, typer.Option("--model", help="A GGUF file; without it, the embedded model.", show_default=False)
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model", help="A GGUF file or a checkpoint folder; without it, the embedded model.", show_default=False
    ),
]


def folder_of(gate: str) -> Path:
    """Return the folder of a gate that ships with this package. Raises UsageError."""
    if gate not in GATES:
        if _GATE.fullmatch(gate) and decisions_path(gate_home(gate)).exists():
            hint = "in your code: Gate.look, Gate.resolve, Gate.recover, Gate.reconcile, Gate.preview"
            raise UsageError(f"`{gate}` is a gate of your own: only your code knows its state and executor", hint=hint)
        raise UsageError(f"there is no gate `{gate}`", hint=f"gates are: {', '.join(GATES)}")
    return gate_home(gate)


def open_store(gate: str) -> Store:
    """Open the record of any gate that has one, your own gates included. Raises UsageError."""
    if not _GATE.fullmatch(gate):
        raise UsageError(f"`{gate}` is not the name of a gate", hint="a gate has a name_in_lower_case")
    folder = gate_home(gate)
    if not decisions_path(folder).exists() and not key_path(folder).exists():
        known = ", ".join(recorded())
        there = f"gates with a record there: {known}" if known else "no gate has a record there"
        hint = f"is SDS_HOME right? The home in use is `{home().absolute()}`; {there}"
        raise UsageError(f"there is no record at `{decisions_path(folder)}` yet", hint=hint)
    return open_record(folder)


def whole_dfid(store: Store, given: str) -> str:
    """Return the one dfid that begins with `given`, else what was given. Raises UsageError when several do, and where
    nothing was given: a shell variable that is empty names no flow.
    """
    if not given.strip():
        raise UsageError("the dfid is empty", hint="sds flows")
    known = [
        row[0]
        for row in store.rows(
            "SELECT dfid FROM decision_flows WHERE substr(dfid, 1, ?) = ? LIMIT 2", (len(named(given)), given)
        )
    ]
    if len(known) > 1 and given not in known:
        raise UsageError(f"several flows begin with `{given}`", hint="give more of the dfid: sds flows")
    return str(known[0]) if len(known) == 1 else given


def recorded() -> list[str]:
    """Return the gates that have a record, one's own among them; what was put aside is no gate's."""
    return sorted(path.parent.name for path in home().glob("*/decisions.db") if _GATE.fullmatch(path.parent.name))


def existing(model: Path) -> Path:
    """Return the path of a model that is there; what it is worth is another question. Raises UsageError."""
    if not model.exists():
        hint = "name a GGUF file or a checkpoint folder; `sds models list` shows those it knows"
        raise UsageError(f"`{model}` cannot be read: no such file or directory", hint=hint)
    return model


@contextmanager
def named_model(path: Path | None) -> Iterator[None]:
    """Turn what a model's library refuses into an error of ours: the user's mistake where it is about the file named."""
    try:
        yield
    except (BackendError, ModelError) as error:
        kind = UsageError if path is not None and f"`{path}" in str(error) else ModelError
        raise kind(str(error), hint=error.hint) from error


def named(text: str) -> str:
    """Return a name as it was typed. Raises UsageError for one that no record can hold: bytes that are not UTF-8."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"`{text}` is not text in UTF-8", hint="type the name, or copy it from what `sds` prints")
    return text


def plain(value: object) -> str:
    """Return a value on one line, what cannot be seen spelled out: a claim's text must not draw on this page."""
    return "".join(char if is_seen(char) else ascii(char)[1:-1] for char in str(value))


def when(at_ms: int, timespec: str = "milliseconds") -> str:
    """Return a time of the record as ISO 8601 in UTC; one that no calendar has, as it stands there."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=timespec)
    except (OSError, *NOT_AS_WRITTEN):
        return f"{at_ms} ms"


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 claim`, `2 claims`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def operator() -> str:
    """Name who is at the keyboard, for the record; a user without a name, as in containers, by number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def read_event_text(source: str) -> str:
    """Return the text of an event file, or of standard input for `-`. Raises EventError."""
    try:
        raw = _read_input() if source == "-" else _read_file(Path(source))
    except OSError as error:
        raise EventError(f"`{source}` cannot be read: {(error.strerror or 'unknown cause').lower()}") from error
    if len(raw) > EVENT_BYTES_MAX:
        raise EventError(f"the event is larger than {EVENT_BYTES_MAX} bytes")
    text = in_utf8(raw)
    if not text.strip():
        raise EventError("the event is empty")
    if _holds_several(text):
        raise EventError(
            "there is more than one event", hint="head -1 takes the first: ... | head -1 | sds ... --event -"
        )
    return text


def _read_input() -> bytes:
    if sys.stdin is None:
        raise EventError("standard input is closed")
    return sys.stdin.buffer.read(EVENT_BYTES_MAX + 1)


def _holds_several(text: str) -> bool:
    """Whether another object follows the first; what is wrong in another way, the kernel says."""
    text = text.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")


def _read_file(path: Path) -> bytes:
    if not path.name:
        raise EventError("--event names no file")
    with path.open("rb") as file:
        return file.read(EVENT_BYTES_MAX + 1)


def print_json(data: Mapping[str, Any] | list[Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, default=str))

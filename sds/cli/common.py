"""What several commands share: argument types, finding gates and records, reading an event."""

from __future__ import annotations

import getpass
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sds.definitions.definition import NAME, GateDefinition
from sds.definitions.registry import find, installed, is_path
from sds.host import paths
from sds.host.interrupt import ends_at_once
from sds.host.paths import gate_home, has_record, home, is_there, key_path, open_record, record_name
from sds.kernel.errors import EventError, ModelError, UsageError, cause_of
from sds.kernel.flow.intake import EVENT_BYTES_MAX, in_utf8
from sds.kernel.storage.store import Store
from sds.models.protocol import BackendError


def as_name(gate: str) -> str:
    """Return the name of a gate that is given by its name or path. Raises UsageError."""
    return find(gate).name if is_path(gate) else gate


def as_words(text: str | None) -> str | None:
    """Return typed text for the record. Bytes that the terminal's encoding lacks are read as UTF-8, else escaped."""
    if text is None or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def written(path: Path | None) -> Path | None:
    """Return a path to write to. Raises UsageError where it is not meant as the name of a file or folder here."""
    if path is not None:
        if not str(path).strip():
            raise UsageError("the path to write to is blank", hint="check that the shell variable in it is set")
        if str(path) == "-":
            raise UsageError("`-` is no path to write to", hint="name a file or a folder")
        if path.parts[:1] == ("~",) or (path.parts[1:] and path.parts[0].startswith("~")):
            raise UsageError(f"no shell has replaced `{path.parts[0]}` in `{path}`", hint="write $HOME in its place")
    return path


GateOption = Annotated[str, typer.Option("--gate", help="The gate's name or path.", callback=as_name)]
OpenedGate = Annotated[str, typer.Option("--gate", help="The gate's name or path.")]
EventFile = Annotated[str, typer.Option("--event", help="A JSON file with one event; - reads standard input.")]
Reason = Annotated[
    str, typer.Option("--reason", help="The reason, kept in the record: at most 500 characters.", callback=as_words)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]
GgufPath = Annotated[
    Path | None, typer.Option("--model", help="A GGUF file. Default: the embedded model.", show_default=False)
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model", help="A GGUF file or a checkpoint folder. Default: the embedded model.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class ChosenGate:
    """The gate that a command works on, given as an argument or an option."""

    gate: Annotated[
        str | None,
        typer.Argument(help="The name of an installed gate, such as refund, or the path of a gate.", metavar="GATE"),
    ] = None
    gate_option: Annotated[str | None, typer.Option("--gate", help="GATE, as an option.", show_default=False)] = None

    @property
    def given(self) -> str:
        """The name or path that was given. Raises UsageError where none or two are."""
        if (self.gate is None) == (self.gate_option is None):
            message = "Missing argument 'GATE'" if self.gate is None else "GATE and --gate exclude each other"
            raise UsageError(message, hint="give the name of a gate, such as refund, or the path of your own")
        return self.gate or self.gate_option or ""

    def find(self) -> GateDefinition:
        """Return the gate's definition. Raises UsageError where none or two are given, or there is no such gate."""
        return defined(self.given)


def defined(gate: str) -> GateDefinition:
    """Return the definition of a gate by its name or path. Raises UsageError."""
    try:
        return find(gate)
    except UsageError as error:
        if NAME.fullmatch(gate) and gate not in installed() and has_record(gate_home(gate)):
            message = f"`{gate}` is a gate of your own, and its definition is not found by its name"
            raise UsageError(message, hint="give the path of its folder or file instead of its name") from error
        raise


def open_store(gate: str) -> Store:
    """Open the record of any gate that has one, also of a user's own. Raises UsageError, StoreError."""
    if not NAME.fullmatch(gate):
        raise UsageError(f"`{gate}` is not the name of a gate", hint="write a name_in_lower_case")
    folder = gate_home(gate)
    if not has_record(folder) and not is_there(key_path(folder)):
        known = ", ".join(recorded())
        there = f"gates with a record there (`--gate`): {known}" if known else "no gate has a record there"
        hint = f"check SDS_HOME: the home in use is `{home().absolute()}`; {there}"
        raise UsageError(f"there is no record at `{record_name(folder)}` yet", hint=hint)
    return open_record(folder)


def whole_dfid(store: Store, given: str) -> str:
    """Return the only dfid that begins with `given`, else `given`. Raises UsageError where several dfids do, or `given` is
    empty, as from a shell variable that is not set.
    """
    if not given.strip():
        raise UsageError("the dfid is empty", hint="sds flows lists them")
    between = named(given), f"{given}~"  # no dfid holds a character after `~`, so that a range finds what begins so
    known = [
        row[0] for row in store.rows("SELECT dfid FROM decision_flows WHERE dfid >= ? AND dfid < ? LIMIT 2", between)
    ]
    if len(known) > 1 and given not in known:
        raise UsageError(f"several flows begin with `{given}`", hint="give more of the dfid: sds flows lists them")
    return str(known[0]) if len(known) == 1 else given


def recorded() -> list[str]:
    """Return the names of the gates that have a record. Folders that were set aside are no gates."""
    return [name for name in paths.recorded() if NAME.fullmatch(name)]


def existing(model: Path) -> Path:
    """Return the path of a model. Raises UsageError where there is no file or folder; its content is not checked."""
    if not model.exists():
        hint = "name a GGUF file or a checkpoint folder; `sds models list` lists the known ones"
        raise UsageError(f"`{model}` cannot be read: no such file or directory", hint=hint)
    return model


@contextmanager
def named_model(path: Path | None) -> Iterator[None]:
    """Raise a model library's error as ModelError, or as UsageError where it is about the file that the user named. Ctrl-C ends
    the process at once.
    """
    try:
        with ends_at_once():
            yield
    except (BackendError, ModelError) as error:
        kind = UsageError if path is not None and f"`{path}" in str(error) else ModelError
        raise kind(str(error), hint=error.hint) from error


def named(text: str) -> str:
    """Return a name as it was typed, in any locale. Raises UsageError where it is not UTF-8: no record can hold it."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError as error:
        hint = "type the name, or copy it from the output of `sds`"
        raise UsageError(f"`{text}` is not text in UTF-8", hint=hint) from error


def operator() -> str:
    """Return the user's name for the record, or the user id where there is no name, as in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def read_event_text(source: str) -> str:
    """Return the text of an event file, or of standard input for `-`. Raises EventError."""
    try:
        raw = _read_input() if source == "-" else _read_file(Path(source))
    except OSError as error:
        raise EventError(f"`{source}` cannot be read: {cause_of(error)}") from error
    if len(raw) > EVENT_BYTES_MAX:
        raise EventError(f"the event is larger than {EVENT_BYTES_MAX} bytes")
    text = in_utf8(raw)
    if not text.strip():
        raise EventError("the event is empty")
    if _holds_several(text):
        raise EventError(
            "there is more than one event", hint="keep the first with head -1: ... | head -1 | sds ... --event -"
        )
    return text


def _read_input() -> bytes:
    if sys.stdin is None:
        raise EventError("standard input is closed")
    return sys.stdin.buffer.read(EVENT_BYTES_MAX + 1)


def _holds_several(text: str) -> bool:
    """Tell whether another object follows the first. The kernel reports any other fault of the text."""
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

"""The world of a demo, made once in a gate's folder: a database, and beside it the queue of its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from sds.definitions.definition import QueuedCase
from sds.host import paths
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.errors import NOT_AS_WRITTEN, StateError, cause_of
from sds.kernel.storage.private_files import make_private_file, tighten

ROOM = "check the free space and the rights of this user, or set SDS_HOME to another folder"


def make_once(
    database: Path, queue: Path, lines: Iterable[Mapping[str, object]], write: Callable[[Path], None]
) -> None:
    """Make both files, private ones. The first process makes them for all: an existing database stays.

    `write(path)` writes the database. Raises StateError where the folder cannot be filled.
    """
    folder = database.parent
    paths.make_private(folder)
    try:
        with TemporaryDirectory(dir=folder, prefix="world-") as made:
            fresh_queue, fresh_database = Path(made) / queue.name, Path(made) / database.name
            make_private_file(fresh_queue)
            fresh_queue.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            write(fresh_database)
            fresh_queue.replace(queue)
            with suppress(FileExistsError):  # another process was first, and may already use its file
                database.hardlink_to(fresh_database)
    except OSError as error:
        raise StateError(f"`{folder}` cannot be written: {cause_of(error)}", hint=ROOM) from error


def read_lines(queue: Path, case: Callable[[dict[str, str]], QueuedCase], *, gate: str) -> list[QueuedCase]:
    """Return the `case` of each line of a queue, in order. Raises StateError where a line is malformed."""
    try:
        return [case(json.loads(line)) for line in queue.read_text(encoding="utf-8").splitlines()]
    except (OSError, *NOT_AS_WRITTEN) as error:
        raise StateError(f"`{queue}` cannot be read", hint=f"sds run {gate} --reset") from error


def released_contract(path: Path) -> Contract:
    """Load a contract of a release, checked against the checksum beside it."""
    checksum = path.with_name(f"{path.name}.sha256").read_text(encoding="ascii")
    return load_contract(path, checksum=checksum.split()[0])


def tighten_files(queue: Path, *databases: Path) -> None:
    """Make a demo's own files private, like every file beside a record; older versions did not. Raises StateError."""
    files = (path.with_name(path.name + end) for path in databases for end in ("", "-wal", "-shm"))
    try:
        for path in (queue, *files):
            tighten(path)
    except OSError as error:
        raise StateError(f"`{queue.parent}` cannot be made private: {cause_of(error)}", hint=ROOM) from error

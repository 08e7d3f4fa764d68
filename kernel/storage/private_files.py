"""Files of a record: only their user may read them, whatever the folder's mode and the umask are."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from tempfile import mkdtemp, mkstemp

OTHERS = 0o077  # the rights of group and others
_RANDOM = "????????"  # what tempfile adds to a prefix


def make_private_file(path: Path) -> None:
    """Make sure that a file exists and that only its user can read it: create it empty, or tighten it. Raises OSError.

    An existing file is not opened: closing it would give up the locks that SQLite holds on it in this process.
    """
    if not path.exists():
        _link_new(path)
    tighten(path)


def tighten(path: Path) -> None:
    """Take the rights to a file from everybody but its user, if it exists. Raises OSError."""
    try:
        mode = path.stat().st_mode
        if S_ISREG(mode) and mode & OTHERS:
            path.chmod(mode & 0o700)
    except FileNotFoundError:
        return


def replace_private_file(path: Path, data: bytes) -> None:
    """Replace `path` by a file with these bytes, which are on disk before they get its name. Raises OSError."""
    made = _written(path, data)
    try:
        made.replace(path)
    except OSError:
        made.unlink()
        raise
    sync_folder(path.parent)


def _link_new(path: Path) -> None:
    made = _written(path, b"")
    try:
        path.hardlink_to(made)
    except FileExistsError:  # another process was first
        return
    finally:
        made.unlink()


def _written(path: Path, data: bytes) -> Path:
    """Write the bytes to a new file beside `path`, of mode 0600; return its path."""
    descriptor, name = mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk must not leave half a key
        Path(name).unlink()
        raise
    return Path(name)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def working_folder(beside: Path, prefix: str) -> Iterator[Path]:
    """Yield a private folder in `beside`, then delete it. Those that killed processes left are deleted first. Raises OSError."""
    for left in beside.glob(f"{prefix}{_RANDOM}"):
        with suppress(OSError), _at_work_in(left):
            shutil.rmtree(left)
    made = Path(mkdtemp(dir=beside, prefix=prefix))
    with _at_work_in(made):
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _at_work_in(folder: Path) -> Iterator[None]:
    """Lock a folder as long as this process lives. Raises OSError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

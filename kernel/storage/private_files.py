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

OTHERS = 0o077  # what group and others may do with a file
_RANDOM = "????????"  # what tempfile adds to a prefix


def make_private_file(path: Path) -> None:
    """Make sure that a file is there and that only its user can read it: made empty, or tightened. Raises OSError.

    One that is there is not opened: to close it again would give up the locks that SQLite holds on it in this process.
    """
    if not path.exists():
        _link_new(path, b"")
    tighten(path)


def tighten(path: Path) -> None:
    """Take the rights to a file from everybody but its user, if it is there. Raises OSError."""
    try:
        mode = path.stat().st_mode
        if S_ISREG(mode) and mode & OTHERS:
            path.chmod(mode & 0o700)
    except FileNotFoundError:
        return


def replace_private_file(path: Path, data: bytes) -> None:
    """Give `path` these bytes, whole and on disk before they have its name. Raises OSError."""
    made = _written(path, data)
    try:
        made.replace(path)
    except OSError:
        made.unlink()
        raise
    sync_folder(path.parent)


def _link_new(path: Path, data: bytes) -> None:
    made = _written(path, data)
    try:
        path.hardlink_to(made)
    except FileExistsError:  # another was first
        return
    finally:
        made.unlink()


def _written(path: Path, data: bytes) -> Path:
    """Return a new file beside `path`, of mode 0600, closed again."""
    descriptor, name = mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a disk that is full keeps no half of a key
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
    """Yield a private folder in `beside`, deleted afterwards, as are those that killed processes left. Raises OSError."""
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

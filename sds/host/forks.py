"""What a process that was forked off must not share with its parent: connections, and locks whose threads are not here."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Something that can be used in a forked process once it has begun anew."""

    def begin_anew(self) -> None:
        """Leave connections, threads and locks to the parent. Called in the forked process before anything else."""


_forked = WeakSet[Forked]()


def begin_anew_in_forks(part: Forked) -> None:
    _forked.add(part)


def _begin_anew() -> None:
    for part in _forked:
        part.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)

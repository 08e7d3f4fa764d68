"""The state the kernel does not own, and the typed snapshot of it that a decision rests on.

A `StateSource` is read outside any transaction. Field names are flat dotted paths (`ticket.fare_minor`); values
are bool, int (counts, minor units, epoch seconds) or str. There are no floats and no nulls: a value that is not
known is left out, and a decision that needs it escalates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Value = bool | int | str
Fields = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class StateRead:
    """One read of one key: its fields and the source's own version of them (any string that changes with them)."""

    fields: Fields
    version: str


class StateSource(Protocol):
    """Where authoritative state comes from. Must be safe to call from several threads.

    It answers only the exact key, letter case included: what is drawn is counted by the key as the event spells it, and
    each further spelling that is answered is a resource of its own, from which everything can be taken once more.
    """

    def read(self, key: str) -> StateRead | None:
        """Return the state of `key` as it is now, or None when there is no such key. Raises StateError."""

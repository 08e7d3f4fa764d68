"""The state the kernel does not own, and the protocol by which it is read.

A `StateSource` is read outside any transaction. Field names are flat dotted paths (`ticket.fare_minor`). Values are bool,
int (counts, minor units, epoch seconds) or str; there are no floats and no nulls. A value that is not known is left out,
and a decision that needs it escalates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Value = bool | int | str
Fields = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class StateRead:
    """One read of one key: its fields, and the source's version of them (any string that changes whenever they do)."""

    fields: Fields
    version: str


class StateSource(Protocol):
    """Where authoritative state comes from. It must be safe to call from several threads.

    It must answer the exact key only, letter case included. What is drawn is counted by the key as the event spells it:
    each further spelling that is answered is another resource, from which everything could be taken once more.
    """

    def read(self, key: str) -> StateRead | None:
        """Return the state of `key` as it is now, or None when there is no such key. Raises StateError."""

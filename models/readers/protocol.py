"""The protocol of a reader: a text and fields in, the probability of each value out.

A reader was fitted before (`models.fitting`) and learns nothing here. It knows no decisions and no contracts. A text
unlike those it was fitted on is not `familiar`, and the caller must not rely on its probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from sds.models.protocol import BackendError

VALUES_MAX = 32
THREADS = 2  # for one text at a time
SCORE = "score"  # the only value of a reader that gives a number in [0, 1]

Field = bool | int | str
Fields = Mapping[str, Field]
Readings = Mapping[str, Mapping[str, float]]  # of other readers, by name: value -> probability
NO_FIELDS: Fields = MappingProxyType({})
NO_READINGS: Readings = MappingProxyType({})


class ReaderError(BackendError):
    """A reader could not be opened, fitted or run. The message is one line; `hint` names the remedy, if one is known."""


class Reading(NamedTuple):
    """`probabilities`: of each value, in the declared order, adding up to 1; of a score `{"score": p}`."""

    probabilities: dict[str, float]
    familiar: bool


class Reader(Protocol):
    """A fitted reader, safe in several threads. Every method may raise `ReaderError`."""

    kind: str
    values: tuple[str, ...]
    sha256: str  # of reader.json, which names every other file by its hash

    def read(self, text: str, fields: Fields = NO_FIELDS, readings: Readings = NO_READINGS) -> Reading: ...

    def close(self) -> None: ...

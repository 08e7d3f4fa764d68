"""The few shapes a decision language is made of. Bytes out, choices in between; nothing repeats but digits and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from sds.kernel.envelope.envelope import Bound


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are forced. Two literals never stand side by side, so all that is forced is in one piece."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One alternative: `then` begins with a literal, and what it spells decides between the options."""

    label: str
    then: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Two or more options, of which exactly one is written."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """The literal of one of the two or more integers of `bound`."""

    name: str
    bound: Bound


@dataclass(frozen=True, slots=True)
class Text:
    """At most `chars_max` printable ASCII characters without the quote and the backslash; possibly none."""

    name: str
    chars_max: int


Node: TypeAlias = Literal | Choice | Number | Text

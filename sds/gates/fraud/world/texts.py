"""The line beside a payment: a merchant's descriptor, a note of the bank's staff, or both; and what it says.

The texts were written one by one for this gate. Each part of the corpus belongs to its own time: a text that a reader
is fitted on never stands beside a payment of the test part.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import NamedTuple

from sds.kernel.errors import NOT_AS_WRITTEN, StateError

from .payments import Payment

CORPUS = Path(__file__).parents[1] / "corpus"
VALUES = ("takeover", "imitation", "coached", "confirmed", "routine")
TELLS = {"takeover": 0.55, "imitation": 0.30, "coached": 0.60}  # share of a scenario's frauds whose text says so
DESCRIPTOR_ALONE = 0.92  # share of the routine payments; the rest has a remark without meaning
MISLEADS = 0.001  # share of the good payments whose text speaks of a fraud
CONFIRMED, CONFIRMED_UNUSUAL, CONFIRMED_FRAUD = 0.03, 0.30, 0.02  # shares that the customer seems to have announced


class Note(NamedTuple):
    """One line and the value that it was written for. Neither kernel nor model learns `value`."""

    text: str
    value: str
    style: str


def read_corpus(part: str, folder: Path = CORPUS) -> dict[str, list[Note]]:
    """Return a part's texts by value. Raises StateError."""
    path, found = folder / f"{part}.jsonl", defaultdict[str, list[Note]](list)
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            found[data["value"]].append(Note(data["text"], data["value"], data["style"]))
    except (OSError, *NOT_AS_WRITTEN) as error:
        raise StateError(f"the texts in `{path}` cannot be read", hint="install this package again") from error
    if set(found) != set(VALUES):
        raise StateError(
            f"`{path}` must have texts of exactly the values {', '.join(VALUES)}", hint="install this package again"
        )
    return dict(found)


class Notes:
    """Draws the lines beside payments from the texts of one part, each as often as others of its kind.

    Most payments without a remark have the merchant's descriptor alone.
    """

    def __init__(self, part: str, rng: Random) -> None:
        self._rng, self._texts = rng, read_corpus(part)
        routine = self._texts.pop("routine")
        for name, alone in (("descriptor", True), ("remark", False)):
            self._texts[name] = [note for note in routine if (note.style == "descriptor") is alone]
        self._left = {name: list[Note]() for name in self._texts}

    def beside(self, payment: Payment) -> Note:
        name = self._value(payment)
        if name == "routine":
            name = "descriptor" if self._rng.random() < DESCRIPTOR_ALONE else "remark"
        left = self._left[name]
        if not left:
            left += self._rng.sample(self._texts[name], len(self._texts[name]))
        return left.pop()

    def _value(self, payment: Payment) -> str:
        fraud, drawn = payment.known_at_min is not None, self._rng.random()
        if fraud and drawn < TELLS.get(payment.scenario, 0.0):
            return payment.scenario
        if not fraud and drawn < MISLEADS:
            return self._rng.choice(tuple(TELLS))
        confirmed = CONFIRMED_FRAUD if fraud else CONFIRMED_UNUSUAL if payment.unusual else CONFIRMED
        return "confirmed" if self._rng.random() < confirmed else "routine"

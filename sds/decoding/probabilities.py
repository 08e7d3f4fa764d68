"""The probabilities of a choice: log-probabilities, shares of the permitted options, a choice's score over its passes;
the prefixes of token texts that a model must read so that every text gets its probability, and the logits of those it has
read. Knows only tokens.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sds.decoding.errors import LANGUAGE_FAILED
from sds.kernel.errors import ModelError
from sds.models.protocol import Row

Logits = NDArray[np.float32]  # after one text [vocab_size]; after the last tokens of a row [outputs, vocab_size]
Passing = Generator[list[Row], list[Logits], list[Logits]]  # one pass: yields its rows, is sent their logits
Text = tuple[int, ...]

JOINT = "|"
_EXPONENT_MAX = 700.0  # exp of more is no finite double


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """The probabilities of one choice.

    `probabilities`: (label, share among the permitted), summing to 1. Single options come first, in the language's
    order; then options that were ruled out together, before any token set them apart, as one entry `A|B`. `z`: the
    unmasked probability of all permitted options together; small where the model would rather have said something else.

    A number with too many values to be listed has one record for each open character: `amount[0]` is the literal's first.
    Its labels are the characters (or groups of digits, where one token holds several), and "" is the end of the number.
    """

    name: str
    probabilities: tuple[tuple[str, float], ...]
    chosen: str
    z: float

    @property
    def confidence(self) -> float:
        return dict(self.probabilities)[self.chosen]


class ChoiceScore:
    """The probability of each option of one choice, multiplied up over its choice points.

    `reach`: the probability of the tokens chosen so far. The shares of options left on the way are measured, not
    estimated; all shares sum to 1.
    """

    def __init__(self, name: str, start: int, order: Sequence[str]) -> None:
        self.name, self.start = name, start
        self._order = {label: place for place, label in enumerate(order)}
        self._reach = self._z = 1.0
        self._shares: dict[tuple[str, ...], float] = {}

    def add(
        self, labels: Sequence[tuple[str, ...]], shares: Sequence[float], best: int, z: float
    ) -> ChoiceRecord | None:
        """Add the shares at one choice point; return the record of the choice once a single option is left."""
        for index, share in enumerate(shares):
            if index != best:
                self._put(labels[index], self._reach * share)
        self._reach *= shares[best]
        self._z *= z
        if len(labels[best]) > 1:
            return None
        self._put(labels[best], self._reach)
        return self._trace(labels[best][0])

    def _put(self, labels: tuple[str, ...], share: float) -> None:
        self._shares[labels] = self._shares.get(labels, 0.0) + share

    def _trace(self, chosen: str) -> ChoiceRecord:
        if any(label not in self._order for labels in self._shares for label in labels) or () in self._shares:
            raise ModelError(f"the language's options for `{self.name}` changed", reason_code=LANGUAGE_FAILED)
        listed = sorted(self._shares, key=lambda labels: (len(labels), [self._order[label] for label in labels]))
        named = tuple((JOINT.join(labels), self._shares[labels]) for labels in listed)
        return ChoiceRecord(self.name, named, chosen, self._z)


class KnownLogits:
    """The logits after texts that continue the same text and were read already, and the forks that have read one to its end."""

    def __init__(self) -> None:
        self._after: dict[Text, tuple[Logits, int | None]] = {}

    def record(self, text: Text, fork: int, logits: Logits) -> None:
        """Record the logits after the last tokens of a text that `fork` has read, shape [outputs, vocab_size]."""
        for left, after in enumerate(reversed(logits)):
            self._after[text[: len(text) - left]] = after, None if left else fork

    def __contains__(self, text: Sequence[int]) -> bool:
        return tuple(text) in self._after

    @property
    def logits(self) -> dict[Text, Logits]:
        """The logits after each text that was read."""
        return {text: logits for text, (logits, _) in self._after.items()}

    @property
    def forks(self) -> set[int]:
        return {fork for _, fork in self._after.values() if fork is not None}

    def follow(self, text: Sequence[int]) -> tuple[Logits, int | None] | None:
        """Return the logits after this text, and the fork that holds it if any; drop all texts that do not begin with it.

        Where there is such a fork, the remaining texts are then counted from its end.
        """
        path = tuple(text)
        self._after = {other: known for other, known in self._after.items() if other[: len(path)] == path}
        found = self._after.get(path)
        if found is not None and found[1] is not None:
            del self._after[path]
            self._after = {other[len(path) :]: known for other, known in self._after.items()}
        return found


def choice_record(name: str, labels: Sequence[str], shares: Sequence[float], best: int, z: float) -> ChoiceRecord:
    """Return the record of a choice made in one step. Equal labels are one option."""
    merged: dict[str, float] = {}
    for label, share in zip(labels, shares, strict=True):
        merged[label] = merged.get(label, 0.0) + share
    return ChoiceRecord(name, tuple(merged.items()), labels[best], z)


def log_mass(logits: Logits) -> float:
    """Return the logarithm of the sum of exp(logits), shape [vocab_size], to about 1e-7."""
    peak = logits.max()
    with np.errstate(over="ignore"):  # a difference beyond float32 becomes minus infinity, and its weight zero
        weights = logits - peak
    np.exp(weights, out=weights)
    return float(peak) + math.log(weights.sum(dtype=np.float64))


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def permitted_shares(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the share of each among these log-probabilities, and Z, their sum as probabilities."""
    return softmax(scores), min(1.0, float(np.exp(scores).sum()))


def at_least(share: float, noise_logp: float) -> float:
    """Return the least that a share can be where its log-odds may be off by `noise_logp`."""
    if not noise_logp:
        return share
    return 1 / (1 + (1 / share - 1) * math.exp(min(noise_logp, _EXPONENT_MAX)))


def best_of(scores: NDArray[np.float64], lengths: Sequence[int] | None, noise_logp_max: float) -> tuple[int, bool]:
    """Return the index of the best score (the first of equals), and whether noise might have made another the best.

    A score is the sum of `lengths` log-probabilities (None: of one each). Each of these may be off by `noise_logp_max`.
    """
    best = int(scores.argmax())
    if not noise_logp_max:
        return best, False
    tokens = np.ones(len(scores)) if lengths is None else np.array(lengths, np.float64)
    close = ~(scores[best] - scores >= noise_logp_max * (tokens + tokens[best]))  # NaN as noise: all are close
    return best, bool(np.delete(close, best).any())


def continuations(texts: Sequence[Text]) -> dict[Text, set[int]]:
    """Return for every proper prefix of these texts, the empty one included, the tokens that follow it in some text."""
    found: dict[Text, set[int]] = {}
    for text in texts:
        for i, token in enumerate(text):
            found.setdefault(text[:i], set()).add(token)
    return found


def maximal_prefixes(prefixes: Iterable[Text]) -> list[Text]:
    """Return the prefixes that are no prefix of another, without the empty one."""
    ordered = sorted(filter(None, prefixes))
    return [one for one, other in pairwise([*ordered, ()]) if other[: len(one)] != one]


def record_logp(logp: dict[Text, float], following: dict[Text, set[int]], written: Text, logits: Logits) -> None:
    """Add to `logp` the log-probability of each continuation of `written`, and remove `written` from `following`.

    `logits`: those after `written`, shape [vocab_size].
    """
    wanted = following.pop(written, None)
    if wanted is not None:
        mass = log_mass(logits)
        logp.update({(*written, token): float(logits[token]) - mass for token in wanted})

"""Checks examples before a fit spends minutes on them; and the form of progress reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sds.models.readers.protocol import VALUES_MAX, ReaderError

Progress = Callable[[int, int, str], None]  # done, total, what
EXAMPLES_MIN = 2  # of a value, to be fitted
CALIBRATION_MIN = 20  # texts or rows; fewer do not determine a probability
TEXTS_MAX = 100_000


def check_texts(texts: Sequence[str], values: Sequence[str], names: Sequence[str]) -> None:
    """Raise ReaderError where a value is not declared, or has too few texts."""
    if not 2 <= len(names) <= VALUES_MAX or len(set(names)) != len(names):
        raise ReaderError(f"a reading has 2 to {VALUES_MAX} different values")
    check_labels(texts, values, names)
    counts = Counter(values)
    for name in names:
        if counts[name] < EXAMPLES_MIN:
            raise ReaderError(
                f"the value `{name}` has {counts[name]} texts",
                hint=f"label at least {EXAMPLES_MIN} texts of each value",
            )


def check_labels(texts: Sequence[str], values: Sequence[str], names: Sequence[str]) -> None:
    """Raise ReaderError where a text has no value, or one that is not declared."""
    if len(texts) != len(values):
        raise ReaderError(f"{len(texts)} texts have {len(values)} values", hint="give each text one value")
    if len(texts) > TEXTS_MAX:
        raise ReaderError(f"{len(texts)} texts are more than the limit of {TEXTS_MAX}")
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ReaderError(f"the value `{unknown[0][:40]}` is not declared", hint=f"use one of: {', '.join(names)}")


def check_enough(examples: int) -> None:
    if examples < CALIBRATION_MIN:
        raise ReaderError(
            f"{examples} examples are too few to calibrate",
            hint=f"keep at least {CALIBRATION_MIN} examples apart from those that are fitted",
        )


def nobody(done: int, total: int, what: str) -> None:
    """Ignore progress."""

"""Out-of-fold predictions (cross-fitting): each learned text is read by a reader that learned the other folds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sds.judgement.fitting import Fitters, Progress
from sds.kernel.canonical import digest

FOLDS = 3

Labels = tuple[Sequence[str], Sequence[str]]  # texts, and the value of each


def cross_fitted(
    fitters: Fitters,
    train: Labels,
    tuning: Labels,
    *,
    names: Sequence[str],
    seed: int,
    distractions: Sequence[str],
    on_progress: Progress,
) -> dict[str, Mapping[str, float]]:
    """Return by text the probabilities of each train text, from a reader that was fitted without its fold.

    What learns from a reader's probabilities must not see those of texts that the reader learned: they are too certain.
    """
    texts, values = train
    fold_of, found = _folds(texts, values), dict[str, Mapping[str, float]]()
    for fold in range(FOLDS):
        others = [place for place, text in enumerate(texts) if fold_of[text] != fold]
        fitted = fitters.text(
            [texts[place] for place in others],
            [values[place] for place in others],
            names=names,
            seed=seed + fold,
            distractions=distractions,
            on_progress=lambda done, total, what, fold=fold: on_progress(
                done, total, f"part {fold + 1} of {FOLDS}, {what}"
            ),  # type: ignore[misc]
        )
        reader = fitted.calibrated(*tuning).reader()
        try:
            found |= {text: reader.read(text).probabilities for text in texts if fold_of[text] == fold}
        finally:
            reader.close()
    return found


def _folds(texts: Sequence[str], values: Sequence[str]) -> dict[str, int]:
    """Return the fold of each text, by hash and separately for each value, so that every fold has about as much of each."""
    of_value = defaultdict[str, list[str]](list)
    for text, value in zip(texts, values, strict=True):
        of_value[value].append(text)
    return {text: place % FOLDS for each in of_value.values() for place, text in enumerate(sorted(each, key=digest))}

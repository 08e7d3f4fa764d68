"""The quick way, in seconds: a linear head on an untuned encoder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from sds.models.fitting.base import BaseEncoder, open_base
from sds.models.fitting.bert_graph import Head, encoder_graph
from sds.models.fitting.examples import Progress, check_texts, nobody
from sds.models.fitting.familiarity import fit_region, fit_spelling, letters_of, nowhere
from sds.models.fitting.fitted import FittedText, indices, run_texts
from sds.models.readers.artifact import MODEL, SPELLING, TOKENIZER
from sds.models.readers.encoder import TextTokenizer

TOKENS_MAX = 256  # of a text; a longer one is cut here, and is not familiar
STRENGTH = 10.0  # the inverse of the penalty, for features whose variances add up to 1
STEPS_MAX = 2000


def fit_head(
    texts: Sequence[str],
    values: Sequence[str],
    *,
    names: Sequence[str],
    base: Path,
    seed: int = 0,
    on_progress: Progress = nobody,
) -> FittedText:
    """Fit a logistic regression on the untuned encoder's features. Raises ReaderError.

    `names`: the declared values, in order; `base`: a folder or zip of a BERT encoder. The result is not calibrated yet.
    """
    check_texts(texts, values, names)
    encoder = open_base(base)
    on_progress(0, 2, "reading the texts")
    files = files_of(encoder, texts)
    seen = features_of(encoder, files, texts)
    features = seen["features"]
    on_progress(1, 2, "fitting the head")
    middle, scale = features.mean(axis=0), float(np.sqrt(features.var(axis=0).sum()))
    fitted = LogisticRegression(C=STRENGTH, max_iter=STEPS_MAX, random_state=seed)
    fitted.fit((features - middle) / scale, indices(values, names))
    weight, bias = fitted.coef_ / scale, fitted.intercept_ - fitted.coef_ @ middle / scale
    if len(names) == 2:  # for two values the regression has one logit
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    head = Head(weight.astype(np.float32), bias.astype(np.float32))
    on_progress(2, 2, "done")
    return finished("head", encoder, head, seen["middle"], texts, files=files, names=names, seed=seed)


def files_of(encoder: BaseEncoder, texts: Sequence[str]) -> dict[str, bytes]:
    """Return the files that tokenize these texts and others like them: the encoder's tokenizer, and the texts' own spelling."""
    bare = {TOKENIZER: encoder.tokenizer}
    return {**bare, SPELLING: fit_spelling(texts, TextTokenizer(bare, tokens_max(encoder)).vocabulary)}


def features_of(
    encoder: BaseEncoder, files: Mapping[str, bytes], texts: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Return the `features` [N, H] and `middle` features [N, H] of every text, from the model as it will be run."""
    nothing = Head(np.zeros((1, encoder.sizes.hidden), np.float32), np.zeros(1, np.float32))
    model = encoder_graph(encoder, nothing, nowhere(encoder.sizes.hidden), tokens_max=tokens_max(encoder))
    return run_texts({MODEL: model, **files}, texts, ["features", "middle"], tokens_max=tokens_max(encoder))


def finished(
    kind: str,
    encoder: BaseEncoder,
    head: Head,
    middle: NDArray[np.float64],
    texts: Sequence[str],
    *,
    files: Mapping[str, bytes],
    names: Sequence[str],
    seed: int,
) -> FittedText:
    """Return the model as it will be run, with the region of the fitted texts in its `middle` [N, H]."""
    model = encoder_graph(encoder, head, fit_region(middle), tokens_max=tokens_max(encoder))
    manifest = {
        "kind": kind,
        "values": list(names),
        "tokens_max": tokens_max(encoder),
        "base": {"name": encoder.name, "sha256": encoder.sha256},
        "seed": seed,
        "fitted": len(texts),
    }
    return FittedText(manifest, {MODEL: model, **files}, tuple(names), tokens_max(encoder), letters_of(texts))


def tokens_max(encoder: BaseEncoder) -> int:
    return min(TOKENS_MAX, encoder.sizes.positions)

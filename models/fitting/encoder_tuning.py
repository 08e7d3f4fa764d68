"""The slow way, in minutes: the whole encoder is fitted with its head, in torch, on two threads of the processor.

AdamW with a rate that rises and falls linearly and is lower for lower layers, smoothed labels, dropout. A batch holds
each text twice, with different typing errors, distractions and dropout, and the two readings must agree (R-drop: Liang
et al. 2021, arXiv:2106.14448). Before that comes an epoch with each text once, where `copies_in` has room for it.
Products are computed in bfloat16 where the processor has them, and sums in 32 bits. The word embeddings are not
trained: a few hundred texts touch few of them, and would move these away from their neighbours.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sds.models.files.cpu import cpu_features
from sds.models.fitting.base import BaseEncoder, open_base
from sds.models.fitting.bert_graph import Head
from sds.models.fitting.bert_torch import Classifier, fitted_weights
from sds.models.fitting.encoder_head import features_of, files_of, finished, tokens_max
from sds.models.fitting.examples import Progress, check_texts, nobody
from sds.models.fitting.fitted import FittedText, indices
from sds.models.fitting.noise import Noise
from sds.models.readers.encoder import TextTokenizer

EPOCHS_MIN, EPOCHS_MAX = 3, 12
TEXTS_SEEN_MAX = 40_000  # over all epochs, so that a fit takes minutes; the more texts, the fewer epochs
BATCH = 32
COPIES = 2  # of each text in a batch
RATE = 3e-4  # of the last layer
FALL = 0.8  # ratio of a layer's rate to that of the layer above it
HEAD_RATE = 1e-3
DECAY = 0.01
SMOOTHING = 0.1
AGREEMENT = 1.0  # weight of the agreement of a text's two readings
WARM_SHARE = 0.1  # share of the steps in which the rate rises
NORM_MAX = 1.0  # of a step's gradient
THREADS = 2
BFLOAT16 = bool({"avx512_bf16", "amx_bf16"} & cpu_features())
PRODUCTS_KEPT = 16  # in oneDNN's cache: for texts of many lengths it would hold gigabytes, and be no faster
_SORTED_BATCHES = 32  # batches among which texts are sorted by length

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS_KEPT))  # read with the first product


def fit_encoder(
    texts: Sequence[str],
    values: Sequence[str],
    *,
    names: Sequence[str],
    base: Path,
    seed: int = 0,
    epochs: int | None = None,
    distractions: Sequence[str] = (),
    on_progress: Progress = nobody,
) -> FittedText:
    """Fine-tune a BERT encoder to tell `names` apart. Raises ReaderError.

    `names`: the declared values, in order; `base`: a folder or zip of the encoder; `epochs`: by default as in
    `copies_in`; `distractions`: sentences that say nothing of the value, one of which is sometimes added to a text. The
    same texts and seed give the same scores, except for the last digits. The result is not calibrated yet.
    """
    check_texts(texts, values, names)
    encoder = open_base(base)
    files = files_of(encoder, texts)
    tokenizer = TextTokenizer(files, tokens_max(encoder))
    copies = copies_in(len(texts)) if epochs is None else [COPIES] * epochs
    with _seeded(seed):
        model = Classifier(encoder, len(names))
        seen = Noise(distractions, random.Random(seed))  # noqa: S311 — no secret
        _train(model, tokenizer, texts, indices(values, names).tolist(), copies, seen, on_progress)
        tuned, head = _taken(model, encoder)
    middle = features_of(tuned, files, texts)["middle"]
    return finished("encoder", tuned, head, middle, texts, files=files, names=names, seed=seed)


def copies_in(texts: int) -> list[int]:
    """Return how often each of so many texts is in a batch, epoch by epoch: COPIES times, in as many epochs as
    TEXTS_SEEN_MAX permits; before them once, where it permits that, too, and these are fewer than EPOCHS_MAX.
    """
    whole = max(EPOCHS_MIN, min(EPOCHS_MAX, TEXTS_SEEN_MAX // (COPIES * texts)))
    left = TEXTS_SEEN_MAX - COPIES * texts * whole
    return [1] * (whole < EPOCHS_MAX and left >= texts) + [COPIES] * whole


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give torch this seed and two threads for a block, and restore both afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _train(
    model: Classifier,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    values: Sequence[int],
    copies_of: Sequence[int],
    seen: Noise,
    on_progress: Progress,
) -> None:
    model.words.weight.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": list(model.head.parameters()), "lr": HEAD_RATE}]
    for height, part in enumerate(reversed([model.norm, *model.layers])):
        groups.append({"params": list(part.parameters()), "lr": RATE * FALL**height})
    groups.append({"params": list(model.places.parameters()), "lr": RATE * FALL ** len(model.layers)})
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, fused=True)
    total = len(copies_of) * -(-len(texts) // BATCH)
    warm = max(1, int(WARM_SHARE * total))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (total - step) / max(1, total - warm))
    )
    model.train()
    done = 0
    for epoch, count in enumerate(copies_of, 1):
        copies = [[tokenizer.encode(seen.as_sent(text))[0] for text in texts] for _ in range(count)]
        for rows in _batches([max(map(len, each)) for each in zip(*copies, strict=True)], seen.draw):
            with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
                logits = model(*padded([copy[row] for copy in copies for row in rows])).float()
            expected = torch.tensor([values[row] for row in rows] * count)
            loss = functional.cross_entropy(logits, expected, label_smoothing=SMOOTHING)
            if count == COPIES:
                loss = loss + AGREEMENT * apart(logits)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM_MAX)
            optimizer.step()
            rate.step()
            done += 1
            on_progress(done, total, f"epoch {epoch} of {len(copies_of)}")


def _batches(lengths: Sequence[int], draw: random.Random) -> list[list[int]]:
    """Return the rows of one epoch, shuffled, with texts of similar length in tokens in one batch."""
    rows = list(range(len(lengths)))
    draw.shuffle(rows)
    batches = []
    for start in range(0, len(rows), BATCH * _SORTED_BATCHES):
        alike = sorted(rows[start : start + BATCH * _SORTED_BATCHES], key=lengths.__getitem__)
        batches += [alike[place : place + BATCH] for place in range(0, len(alike), BATCH)]
    draw.shuffle(batches)
    return batches


def apart(logits: Tensor) -> Tensor:
    """Return the mean of both Kullback-Leibler divergences between the two readings of each text.

    `logits` [2 B, K]: those of the first copies, then those of the second.
    """
    first, second = functional.log_softmax(logits, dim=-1).chunk(COPIES)
    both = (first.exp() - second.exp()) * (first - second)
    return both.sum(-1).mean() / 2


def padded(texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the tokens side by side, padded with 0, and the texts' lengths. [B, T], [B]."""
    lengths = [len(text) for text in texts]
    longest = max(lengths)
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts]), torch.tensor(lengths)


def _taken(model: Classifier, encoder: BaseEncoder) -> tuple[BaseEncoder, Head]:
    weight, bias = (part.detach().numpy().astype(np.float32) for part in (model.head.weight, model.head.bias))
    return replace(encoder, weights=fitted_weights(model, encoder)), Head(weight, bias, SMOOTHING)

"""Measures batch variance: how far the other rows of a pass, and the place in the cache, move a row's log-probabilities.

A choice whose two best lie closer than twice this figure could fall the other way in another batch. The work has the
shape of decisions: a common prompt, a case for each, a forced run, a single token. The tokens are random. The
measurement shows what a backend does in these passes, not the worst that it could do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sds.models.protocol import Backend, BackendError, Row

SEED = 4
COMMON_TOKENS, RUN_TOKENS = 60, 8
CASE_TOKENS = (20, 70)
SLOTS_OUT_OF_STEP_MAX = 4  # slots that are used in compositions other than full batches
TURNS = 2  # prompts in each slot that is out of step

Prompt = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Prompt number `prompt` in `slot`; its first row is in pass number `delay`. `cut`: a long row is read in two passes."""

    slot: int
    prompt: int
    delay: int = 0
    cut: bool = False


def batch_variance(backend: Backend, *, prompts: Sequence[Prompt] | None = None) -> float:
    """Return the greatest difference of any log-probability, in nats, between passes that hold a row in different batches.

    The slot is prefilled with the first section of each of `prompts`; each further section is one row of a pass. 0.0
    with one slot, where the protocol makes equal passes bit-equal. Leaves every used slot empty. Raises BackendError.
    """
    if backend.slots == 1:
        return 0.0
    work = prompts or _decisions(backend)
    used = min(backend.slots, SLOTS_OUT_OF_STEP_MAX)
    least: dict[tuple[int, int], NDArray[np.float32]] = {}
    most: dict[tuple[int, int], NDArray[np.float32]] = {}
    compositions = _compositions(len(work), used, max(map(len, work)) - 1, cut=backend.rows_may_be_cut)
    for entries in chain(compositions, _full_batches(len(work), backend.slots)):
        for row, logp in _logps(backend, work, entries):
            least[row] = np.minimum(least.get(row, logp), logp)
            most[row] = np.maximum(most.get(row, logp), logp)
        if backend.fragmented:
            backend.defragment()
    for slot in range(backend.slots):
        backend.prefill([], slot=slot)
    backend.defragment()
    return float(np.max([(most[row] - least[row]).max() for row in most]))  # NaN if any is NaN


def _decisions(backend: Backend) -> list[Prompt]:
    rng = np.random.default_rng(SEED)

    def text(tokens: int) -> list[int]:
        drawn = [int(token) for token in rng.integers(0, backend.vocab_size, 4 * tokens)]
        found = [token for token in drawn if backend.piece(token)][:tokens]
        if len(found) < tokens:
            raise BackendError("the vocabulary has too few tokens that stand for text")
        return found

    common = text(COMMON_TOKENS)
    return [[common, text(case), text(RUN_TOKENS), text(1)] for case in CASE_TOKENS]


def _compositions(prompts: int, slots: int, rows: int, *, cut: bool) -> Iterator[list[_Entry]]:
    """Yield prompts alone; in pairs; all slots in step, with `cut` the last row in two passes; all out of step, used twice.

    The last leaves holes in the cache, in which others may continue with their cells out of order.
    """
    for prompt in range(prompts):
        yield [_Entry(0, prompt)]
        yield [_Entry(0, (prompt + 1) % prompts), _Entry(1, prompt)]
    yield [_Entry(slot, slot % prompts, cut=cut and slot == slots - 1) for slot in range(slots)]
    turns = [(turn, slot) for turn in range(TURNS) for slot in range(slots)]
    yield [_Entry(slot, (slot // prompts + slot + turn) % prompts, slot % rows + turn * rows) for turn, slot in turns]


def _full_batches(prompts: int, slots: int) -> Iterator[list[_Entry]]:
    """Yield all slots in step, with one prompt and with all: as many rows in a call as possible, alike and mixed."""
    for prompt in range(prompts):
        yield [_Entry(slot, prompt) for slot in range(slots)]
    yield [_Entry(slot, slot % prompts) for slot in range(slots)]


def _logps(
    backend: Backend, work: Sequence[Prompt], entries: Sequence[_Entry]
) -> Iterator[tuple[tuple[int, int], NDArray[np.float32]]]:
    """Run every entry's rows; yield ((prompt, row), its log-probabilities [outputs, vocab_size])."""
    for number in range(max(entry.delay + len(work[entry.prompt]) for entry in entries) - 1):
        for entry in entries:
            if entry.delay == number:
                backend.prefill(work[entry.prompt][:1], slot=entry.slot)
        held = [(entry, number - entry.delay + 1) for entry in entries]
        scheduled = [(entry, row) for entry, row in held if 1 <= row < len(work[entry.prompt])]
        rows = [_row(backend, entry, work[entry.prompt][row]) for entry, row in scheduled]
        for (entry, row), logits in zip(scheduled, backend.run(rows) if rows else [], strict=True):
            yield (entry.prompt, row), _logp(logits)
    for entry in entries:
        backend.prefill(work[entry.prompt][:1], slot=entry.slot)


def _row(backend: Backend, entry: _Entry, tokens: Sequence[int]) -> Row:
    """Return the row whose logits are compared; if it is cut, the part before it is read now."""
    if entry.cut and len(tokens) >= 2 * RUN_TOKENS:
        half = len(tokens) // 2
        backend.run([Row(entry.slot, tokens[:half], 0)])
        tokens = tokens[half:]
    return Row(entry.slot, tokens, min(len(tokens), RUN_TOKENS))


def _logp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return np.asarray(shifted - total, np.float32)

"""How far a row's company in a pass, and its place in the cache, move its log-probabilities: measured, not known.

A choice whose two best lie closer than twice this figure could fall the other way in other company. The work is shaped
as decisions are: a prompt in common, a case of each one's own, a forced run, a single token. The tokens are random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sds.models.protocol import Backend, BackendError, Row

SEED = 4
COMMON_TOKENS, RUN_TOKENS = 200, 12
CASE_TOKENS = (40, 64, 100)
COMPANY_MAX = 16

Prompt = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Seat:
    """Prompt `prompt` in `slot`, its first row in pass number `delay`."""

    slot: int
    prompt: int
    delay: int = 0


def shape_noise(backend: Backend, *, prompts: Sequence[Prompt] | None = None) -> float:
    """Return the greatest difference of any log-probability between passes that hold the same rows in other company.

    Of each of `prompts` the first section is begun, each further one is a row of a pass of its own. 0.0 with one slot,
    where equal passes are bit-equal by the protocol. Leaves every slot it used empty. Raises BackendError.
    """
    if backend.slots == 1:
        return 0.0
    work = prompts or _decisions(backend)
    least: dict[tuple[int, int], NDArray[np.float32]] = {}
    most: dict[tuple[int, int], NDArray[np.float32]] = {}
    for seats in _companies(len(work), min(backend.slots, COMPANY_MAX), max(map(len, work)) - 1):
        for row, logp in _seated(backend, work, seats):
            least[row] = np.minimum(least.get(row, logp), logp)
            most[row] = np.maximum(most.get(row, logp), logp)
    return max(float((most[row] - least[row]).max()) for row in most)


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


def _companies(prompts: int, slots: int, rows: int) -> Iterator[list[_Seat]]:
    """Each alone, in the first and in the last slot; two by two; all slots in step; all slots out of step."""
    for prompt in range(prompts):
        yield [_Seat(0, prompt)]
        yield [_Seat(slots - 1, prompt)]
        yield [_Seat(0, (prompt + 1) % prompts), _Seat(1, prompt)]
    yield [_Seat(slot, slot % prompts) for slot in range(slots)]
    yield [_Seat(slot, (slot + slot // prompts) % prompts, slot % rows) for slot in range(slots)]


def _seated(
    backend: Backend, work: Sequence[Prompt], seats: Sequence[_Seat]
) -> Iterator[tuple[tuple[int, int], NDArray[np.float32]]]:
    """Run every seat's rows; yield ((prompt, row), its log-probabilities [outputs, vocab_size])."""
    for seat in seats:
        backend.begin(work[seat.prompt][:1], slot=seat.slot)
    for number in range(max(seat.delay + len(work[seat.prompt]) for seat in seats) - 1):
        held = [(seat, number - seat.delay + 1) for seat in seats]
        riding = [(seat, row) for seat, row in held if 1 <= row < len(work[seat.prompt])]
        rows = [_row(seat.slot, work[seat.prompt][row]) for seat, row in riding]
        for (seat, row), logits in zip(riding, backend.run(rows), strict=True):
            yield (seat.prompt, row), _logp(logits)
    for seat in seats:
        backend.begin([], slot=seat.slot)


def _row(slot: int, tokens: Sequence[int]) -> Row:
    return Row(slot, tokens, min(len(tokens), RUN_TOKENS))


def _logp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return np.asarray(shifted - total, np.float32)

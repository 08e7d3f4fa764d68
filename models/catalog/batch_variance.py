"""How far a row's company in a pass, and its place in the cache, move its log-probabilities: measured, not known.

A choice whose two best lie closer than twice this figure could fall the other way in other company. The work is shaped
as decisions are: a prompt in common, a case of each one's own, a forced run, a single token. The tokens are random:
these passes show what a backend does, not all that it could do.
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
COMPANY_MAX = 4  # out of step; in step go all slots
TURNS = 2

Prompt = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Seat:
    """Prompt `prompt` in `slot`, its first row in pass number `delay`; `cut`: a long row in two passes."""

    slot: int
    prompt: int
    delay: int = 0
    cut: bool = False


def batch_variance(backend: Backend, *, prompts: Sequence[Prompt] | None = None) -> float:
    """Return the greatest difference of any log-probability between passes that hold the same rows in other company.

    Of each of `prompts` the first section is begun, each further one is a row of a pass of its own. 0.0 with one slot,
    where equal passes are bit-equal by the protocol. Leaves every slot it used empty. Raises BackendError.
    """
    if backend.slots == 1:
        return 0.0
    work = prompts or _decisions(backend)
    used = min(backend.slots, COMPANY_MAX)
    least: dict[tuple[int, int], NDArray[np.float32]] = {}
    most: dict[tuple[int, int], NDArray[np.float32]] = {}
    companies = _companies(len(work), used, max(map(len, work)) - 1, cut=backend.rows_may_be_cut)
    for seats in chain(companies, _crowds(len(work), backend.slots)):
        for row, logp in _seated(backend, work, seats):
            least[row] = np.minimum(least.get(row, logp), logp)
            most[row] = np.maximum(most.get(row, logp), logp)
        if backend.fragmented:
            backend.defragment()
    for slot in range(backend.slots):
        backend.prefill([], slot=slot)
    backend.defragment()
    return float(np.max([(most[row] - least[row]).max() for row in most]))  # no number if one is none


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


def _companies(prompts: int, slots: int, rows: int, *, cut: bool) -> Iterator[list[_Seat]]:
    """Each alone; two by two; all slots in step, `cut`: the last row by row in two passes; all out of step and used again.

    The last leaves holes in the cache, in which others might go on: their cells would be out of order.
    """
    for prompt in range(prompts):
        yield [_Seat(0, prompt)]
        yield [_Seat(0, (prompt + 1) % prompts), _Seat(1, prompt)]
    yield [_Seat(slot, slot % prompts, cut=cut and slot == slots - 1) for slot in range(slots)]
    turns = [(turn, slot) for turn in range(TURNS) for slot in range(slots)]
    yield [_Seat(slot, (slot // prompts + slot + turn) % prompts, slot % rows + turn * rows) for turn, slot in turns]


def _crowds(prompts: int, slots: int) -> Iterator[list[_Seat]]:
    """All slots in step, with one prompt and with all of them: as many rows in a call as there can be, alike and mixed."""
    for prompt in range(prompts):
        yield [_Seat(slot, prompt) for slot in range(slots)]
    yield [_Seat(slot, slot % prompts) for slot in range(slots)]


def _seated(
    backend: Backend, work: Sequence[Prompt], seats: Sequence[_Seat]
) -> Iterator[tuple[tuple[int, int], NDArray[np.float32]]]:
    """Run every seat's rows; yield ((prompt, row), its log-probabilities [outputs, vocab_size])."""
    for number in range(max(seat.delay + len(work[seat.prompt]) for seat in seats) - 1):
        for seat in seats:
            if seat.delay == number:
                backend.prefill(work[seat.prompt][:1], slot=seat.slot)
        held = [(seat, number - seat.delay + 1) for seat in seats]
        riding = [(seat, row) for seat, row in held if 1 <= row < len(work[seat.prompt])]
        rows = [_row(backend, seat, work[seat.prompt][row]) for seat, row in riding]
        for (seat, row), logits in zip(riding, backend.run(rows) if rows else [], strict=True):
            yield (seat.prompt, row), _logp(logits)
    for seat in seats:
        backend.prefill(work[seat.prompt][:1], slot=seat.slot)


def _row(backend: Backend, seat: _Seat, tokens: Sequence[int]) -> Row:
    """Return the row whose logits are compared; where it is cut, what comes before is read now."""
    if seat.cut and len(tokens) >= 2 * RUN_TOKENS:
        half = len(tokens) // 2
        backend.run([Row(seat.slot, tokens[:half], 0)])
        tokens = tokens[half:]
    return Row(seat.slot, tokens, min(len(tokens), RUN_TOKENS))


def _logp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return np.asarray(shifted - total, np.float32)

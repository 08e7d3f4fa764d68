"""Token trees side by side in one call of OpenVINO's graph, as rows padded to one length. Knows only tokens and shapes.

Padding leaves no trace. It is masked; and because all that a token sees ends at a multiple of PAST_TOKENS, the
remaining additions keep their order. The tests compare the bits; `sds models prepare` measures this on each machine.

Tokens of a tree are at the right end of its padded row, their past at the left end of the past. Only the attention uses
padded rows; all else is computed for each token (`Inputs`). `PaddedKVCache` holds the past as the graph takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import ArrayKVCache
from sds.models.cache.token_tree import TokenTree

MASKED = -3.38e38  # nearly the least number of BF16: added to any score, it leaves exp() at zero
BATCH_TOKENS_MAX = 512  # of several trees together
PADDED_TOKENS_MAX = 2 * BATCH_TOKENS_MAX  # of their padded rows
TOKENS_STEP = 32  # several trees are read as a multiple of so many tokens, so that shapes recur
ROW_TOKENS = 8  # padded rows are multiples of this
# The past of a tree, or all that a token sees, is a multiple of this: OpenVINO adds up so many numbers at once.
PAST_TOKENS = 32
PADDED_BYTES_MAX = 256 << 20  # additional memory for the pasts of batches of several trees
SURPLUS_TOKENS_MAX = 16  # padding of a row alone, up to a length that the graph has a copy for


class Inputs(NamedTuple):
    """The inputs of the graph for a batch.

    `ids`, `positions`: [1, tokens]. `mask`, added to the attention's scores: [trees, 1, longest, past + longest].
    `lines`: the index of the token at each place of the padded rows, [trees, longest]. `places`: the place of each
    token on these rows, end to end, [1, tokens].
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.float32]
    lines: NDArray[np.int64]
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees of one call, with at most `past` tokens before each, on padded rows of `longest` tokens.

    `padded`: the padding runs through the model, too.
    """

    past: int
    longest: int
    trees: list[TokenTree] = field(default_factory=list)
    padded: bool = True

    def inputs(self) -> Inputs:
        """Return the inputs. Padding attends to everything, nothing attends to it, and its logits are not wanted."""
        shape = len(self.trees), self.longest
        ids, positions, real = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, self.padded)
        mask = np.zeros((shape[0], 1, self.longest, self.past + self.longest), np.float32)
        for row, tree in enumerate(self.trees):
            start = self.longest - len(tree.tokens)
            ids[row, start:] = tree.tokens
            positions[row, start:] = np.add(tree.depths, tree.position)
            real[row, start:] = True
            mask[row, 0, start:, tree.position : self.past + start] = MASKED
            seen = np.where(tree.attention_mask(), np.float32(0), np.float32(MASKED))
            mask[row, 0, start:, self.past + start :] = seen
        places = np.flatnonzero(real)
        if not self.padded:  # fill up with copies of the first token
            places = np.concatenate([places, np.full(-len(places) % TOKENS_STEP, places[0])])
        return Inputs(ids.ravel()[None, places], positions.ravel()[None, places], mask, self._lines(), places[None])

    def _lines(self) -> NDArray[np.int64]:
        """Return `lines`. A row's padding is its own first token: masked values of another prompt might be NaN."""
        if self.padded:
            return np.arange(len(self.trees) * self.longest).reshape(-1, self.longest)
        lines, count = np.zeros((len(self.trees), self.longest), np.int64), 0
        for row, tree in enumerate(self.trees):
            lines[row] = count
            lines[row, self.longest - len(tree.tokens) :] = np.arange(count, count + len(tree.tokens))
            count += len(tree.tokens)
        return lines


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where a row's tokens are: the batch, the padded row in it, and the positions on that row."""

    batch: int
    padded_row: int
    path: NDArray[np.intp]


def batches_of(
    rows: Iterable[tuple[tuple[int, int], Sequence[int]]],
    *,
    past_max: int,
    mixed_max: float,
    lengths: Sequence[int] = (),
) -> tuple[list[Batch], list[RowIndex]]:
    """Return the batches that read rows, each given as ((slot, position) where it continues, tokens), and where each row is.

    Rows that continue one place are a tree. `past_max`: tokens before all trees of a batch of several. `mixed_max`:
    while no token sees more positions than this, and all that a token sees ends at a multiple of PAST_TOKENS, padding
    leaves no trace in the numbers. Then trees of any shape share a batch, and one alone gets the next of `lengths`, for
    which the graph has a copy. Beyond it, only trees of one shape share a batch, and there are few shapes, because the
    library prepares itself for each new one.
    """
    trees: dict[tuple[int, int], TokenTree] = {}
    paths = [(place, trees.setdefault(place, TokenTree(*place)).add(tokens)) for place, tokens in rows]
    batches = list[Batch]()
    index: dict[tuple[int, int], tuple[int, int, int]] = {}
    for group in _groups(trees.values(), past_max, mixed_max):
        batch = (
            _mixed(group, lengths, mixed_max) if _seen(group) <= mixed_max else Batch(*_shape(group[0])[::-1], group)
        )
        for row, tree in enumerate(group):
            index[tree.root, tree.position] = len(batches), row, batch.longest - len(tree.tokens)
        batches.append(batch)
    indices = []
    for place, path in paths:
        number, row, start = index[place]
        indices.append(RowIndex(number, row, np.array(path, np.intp) + start))
    return batches, indices


def prepared_for(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Return those of `lengths` that a row alone of so many tokens may be padded to."""
    return [length for length in lengths if tokens <= length <= tokens + SURPLUS_TOKENS_MAX]


def _mixed(trees: list[TokenTree], lengths: Sequence[int], mixed_max: float) -> Batch:
    """Return the batch of trees that may have different shapes, the longest first."""
    tokens, alone = len(trees[0].tokens), len(trees) == 1
    fitting = [length for length in prepared_for(tokens, lengths) if _seen(trees, length) <= mixed_max]
    longest = min(fitting) if alone and fitting else _row(tokens)
    return Batch(_seen(trees, longest) - longest, longest, trees, padded=alone)


def _seen(trees: Sequence[TokenTree], longest: int = 0) -> int:
    """Return how many positions the tokens of mixed trees see, on rows of `longest` tokens, by default as long as needed."""
    longest = longest or max(_row(len(tree.tokens)) for tree in trees)
    return _up(max(tree.position for tree in trees) + longest, PAST_TOKENS)


def _groups(trees: Iterable[TokenTree], past_max: int, mixed_max: float) -> Iterator[list[TokenTree]]:
    """Split trees into the largest possible batches, the longest first, to keep padding small."""

    def order(tree: TokenTree) -> tuple[int, ...]:
        return _seen([tree]) <= mixed_max, *_shape(tree), len(tree.tokens)

    group = list[TokenTree]()
    for tree in sorted(trees, key=order, reverse=True):
        both = [*group, tree]
        longest, past = max(map(_shape, both))[0], max(_shape(each)[1] for each in both) + PAST_TOKENS
        if group and (
            not _alike(group, tree, mixed_max)
            or sum(len(each.tokens) for each in both) > BATCH_TOKENS_MAX
            or len(both) * longest > PADDED_TOKENS_MAX
            or len(both) * past > past_max
        ):
            yield group
            both = [tree]
        group = both
    if group:
        yield group


def _alike(group: Sequence[TokenTree], tree: TokenTree, mixed_max: float) -> bool:
    """Return whether a tree gets the same numbers in a batch with these as in one of its own."""
    if _seen([tree]) <= mixed_max:
        return _seen([*group, tree]) <= mixed_max
    longest, _ = shape = _shape(tree)
    padded = (len(group) + 1) * longest <= BATCH_TOKENS_MAX  # with one shape, padding is run, too
    return _seen(group) > mixed_max and shape == _shape(group[0]) and padded


def _shape(tree: TokenTree) -> tuple[int, int]:
    """Return the length of a padded row for this tree, and its past."""
    return _row(len(tree.tokens)), _up(tree.position, PAST_TOKENS)


def _row(tokens: int) -> int:
    """Return the length of a padded row of so many tokens. A single token, the commonest case, is not padded."""
    return tokens if tokens == 1 else _up(tokens, ROW_TOKENS)


def _up(tokens: int, to: int) -> int:
    return -(-tokens // to) * to


class PaddedKVCache(ArrayKVCache):
    """A slot holds a little more than the context, so that any past can be padded to a multiple of PAST_TOKENS."""

    def __init__(self, shape: tuple[int, int, int], kind: type[Any], slots: int) -> None:
        planes, tokens, width = shape
        super().__init__((planes, tokens + PAST_TOKENS, width), kind, slots)
        self._padded = np.empty(0, kind)
        self.past_tokens_max = PADDED_BYTES_MAX // (planes * width * self._padded.itemsize)

    def past(self, batch: Batch) -> Sequence[NDArray[Any]]:
        """Return keys and values before the trees of a batch, of each layer in turn [trees, past, width].

        Beyond a tree's own position lies whatever was written there; these are numbers, and they are masked.
        """
        slots = [self.memory(tree.root) for tree in batch.trees]
        if len(slots) == 1:
            return list(slots[0][:, None, : batch.past])
        planes, _, width = self.shape
        shape = planes, len(slots), batch.past, width
        if self._padded.size < (size := int(np.prod(shape))):
            self._padded = np.empty(0, self.kind)  # frees the old array first
            self._padded = np.empty(size, self.kind)
        padded = self._padded[:size].reshape(shape)
        for n, slot in enumerate(slots):
            padded[:, n] = slot[:, : batch.past]
        return list(padded)

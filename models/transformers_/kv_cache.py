"""Keys and values of several prompts at once: purely tensors, no text, no scheduling.

`TensorKVCache` holds every prompt in a seat of its own, in memory that never moves: [seats, heads, context + 1, width] for keys
and for values of every layer, at worst `seats x context x` what one token takes (on a CPU only what was written is ever
committed). Rows of one pass are one call of the model, padded on the left to the longest, under an explicit mask. A
model that this does not suit (sliding windows, recurrent states, positions of its own making) has `OwnCaches`: one
cache a prompt, one row a call. Which it is, is tried out when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from sds.models.cache.prefix_caching import Part
from sds.models.protocol import BackendError
from sds.models.transformers_.loading import failing

EXTENT_MIN = 256  # cells a captured pass reads at least: fewer shapes, fewer graphs
WARM_UPS = 3
PROBE_TOKENS = ((1, 2, 3, 4, 5), (6, 7, 8))
PROBE_SHARE_MAX = {torch.float32: 1e-3}  # of the logits' own spread; half precision is noisier
PROBE_SHARE_MAX_HALF = 0.25
SHARED_ROPES = {"dynamic", "longrope"}  # they turn by the longest row, so a row would see its company

Forward = Callable[..., torch.Tensor]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TensorKVCache:
    """Seats of one size; every one can be cut back and copied, and they go through the model together."""

    together = True

    def __init__(self, device: torch.device, dtype: torch.dtype, *, seats: int, context: int) -> None:
        self.static = device.type == "cuda"  # one-token passes in few shapes, each captured once
        self._device, self._dtype, self._seats, self._context = device, dtype, seats, context
        self._written = 0
        self._pass = _Pass.of_nothing(device)
        make: Any = partial(_Layer, self)
        self._cache: Any = Cache(layer_class_to_replicate=make)
        self._graphs: dict[tuple[int, int], Compute] = {}

    def run(self, parts: Sequence[Part], forward: Forward, *, repeated: bool = False) -> torch.Tensor:
        """Call `forward` on all parts; return [parts, ...]. `repeated`: it computes the same in every such call."""
        extent = max(part.position + len(part.tokens) for part in parts)
        self._written = max(self._written, extent)
        if self.static and repeated and all(len(part.tokens) == 1 for part in parts):
            return self._run_static(parts, forward, extent)
        alone = parts[0].seat if len(parts) == 1 else None
        return self._compute(*self._inputs(parts, len(parts)), extent=extent, alone=alone, forward=forward)

    def cut(self, _seat: int, _position: int, _surplus: int) -> bool:
        """Cells beyond a prompt's end are masked and written over: there is nothing to do."""
        return True

    def taken(self, seat: int, start: int, end: int) -> tuple[list[torch.Tensor], int]:
        stretch = [layer[seat, :, start:end].clone() for layer in self._stored()]
        return stretch, sum(cells.nbytes for cells in stretch)

    def put(self, seat: int, start: int, stretch: list[torch.Tensor]) -> None:
        end = start + stretch[0].shape[1]
        self._written = max(self._written, end)
        for layer, cells in zip(self._stored(), stretch, strict=True):
            layer[seat, :, start:end] = cells

    def fork(self, source: int, target: int, tokens: int) -> None:
        self._grow(target + 1)
        for layer in self._stored():
            layer[target, :, :tokens] = layer[source, :, :tokens]

    def forget(self, _seat: int) -> None:
        """What is written over needs no wiping; the memory stays for the next prompt or fork."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """One cell more than the context: where padding is written, and nothing is read."""
        heads, width = like.shape[1], like.shape[3]
        return torch.empty((self._seats, heads, self._context + 1, width), dtype=like.dtype, device=like.device)

    def exchange(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write `new`, shape [rows, heads, tokens, width]; return all that the pass reads, [rows, heads, extent, width].

        What is not a row's own reads as zero: an earlier prompt may have left there what is no number.
        """
        now = self._pass
        stored[now.seats[:, None], :, now.cells] = new.transpose(1, 2)
        cells = stored[:, :, : now.extent]
        if now.alone is not None:
            return cells[now.alone : now.alone + 1]
        return cells.index_select(0, now.seats).masked_fill_(now.foreign, 0)

    def _stored(self) -> list[torch.Tensor]:
        return [stored for layer in self._cache.layers for stored in (layer.keys, layer.values)]

    def _grow(self, seats: int) -> None:
        """Make room for forks: in powers of two, because all that is written moves once."""
        if seats <= self._seats:
            return
        wanted = _power_of_two(seats)
        self._graphs.clear()
        for layer in self._cache.layers:  # what has moved stays: where memory runs out, a later fork goes on from there
            layer.keys, layer.values = self._moved(layer.keys, wanted), self._moved(layer.values, wanted)
        self._seats = wanted

    def _moved(self, stored: torch.Tensor, seats: int) -> torch.Tensor:
        if len(stored) >= seats:
            return stored
        larger = stored.new_empty((seats, *stored.shape[1:]))
        larger[: len(stored), :, : self._written] = stored[:, :, : self._written]
        return larger

    def _inputs(self, parts: Sequence[Part], rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return seats [rows], tokens and their positions [rows, longest]; -1 is the position of padding."""
        longest = max(len(part.tokens) for part in parts)
        seats, ids = np.zeros(rows, np.int64), np.zeros((rows, longest), np.int64)
        at = np.full((rows, longest), -1, np.int64)
        for row, part in enumerate(parts):
            seats[row], start = part.seat, longest - len(part.tokens)
            ids[row, start:] = part.tokens
            at[row, start:] = np.arange(part.position, part.position + len(part.tokens))
        found = (torch.from_numpy(array).to(self._device) for array in (seats, ids, at))
        return next(found), next(found), next(found)

    def _compute(
        self,
        seats: torch.Tensor,
        ids: torch.Tensor,
        at: torch.Tensor,
        *,
        extent: int,
        alone: int | None,
        forward: Forward,
    ) -> torch.Tensor:
        """Only tensors decide what is computed here, so that it can be captured."""
        own = torch.arange(extent, device=self._device) <= at[:, :, None]  # [rows, tokens, extent]
        mask = torch.zeros(own.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(~own, torch.finfo(self._dtype).min)[:, None]
        cells = torch.where(at < 0, self._context, at)
        self._pass = _Pass(seats, cells, ~own[:, None, -1, :, None], extent, alone)
        return forward(input_ids=ids, position_ids=at.clamp(min=0), attention_mask=mask, past_key_values=self._cache)

    def _run_static(self, parts: Sequence[Part], forward: Forward, extent: int) -> torch.Tensor:
        """Rows and extent rounded up: one graph serves many passes, and its rows of padding touch nothing."""
        rows, extent = _power_of_two(len(parts)), min(max(EXTENT_MIN, _power_of_two(extent)), self._context)
        inputs = self._inputs(parts, rows)
        compute = self._graphs.get((rows, extent))
        if compute is None:
            compute = partial(self._compute, extent=extent, alone=None, forward=forward)
            if self._device.type == "cuda":
                compute = _captured(compute, inputs, self._device)
            self._graphs[rows, extent] = compute
        return compute(*inputs)[: len(parts)]


class OwnCaches:
    """One of transformers' own caches for each prompt: any model, one row a call, a fork is a whole copy."""

    together = False

    def __init__(self, device: torch.device, config: Any) -> None:
        self._device, self._config = device, config
        self._caches: dict[int, DynamicCache] = {}

    def run(self, parts: Sequence[Part], forward: Forward, **_: bool) -> torch.Tensor:
        """Call `forward` on the only part."""
        (part,) = parts
        cache = self._caches.setdefault(part.seat, DynamicCache(config=self._config))
        return forward(input_ids=torch.tensor([list(part.tokens)], device=self._device), past_key_values=cache)

    def cut(self, seat: int, position: int, surplus: int) -> bool:
        """Return whether the cache could be cut back: a window has forgotten what a cut would have to bring back."""
        cache = self._caches.get(seat)
        if cache is None or not position or not _all_dynamic(cache):
            return False
        cache.crop(-surplus)
        return True

    def taken(self, seat: int, _start: int, _end: int) -> tuple[DynamicCache, int]:
        """Return all that the seat holds: windows and states cannot be taken apart."""
        whole = deepcopy(self._caches[seat])
        tensors = [held for layer in whole.layers for held in vars(layer).values() if isinstance(held, torch.Tensor)]
        return whole, sum(held.nbytes for held in tensors)

    def put(self, seat: int, _start: int, stretch: DynamicCache) -> None:
        self._caches[seat] = deepcopy(stretch)

    def fork(self, source: int, target: int, _tokens: int) -> None:
        if source in self._caches:
            self._caches[target] = deepcopy(self._caches[source])

    def forget(self, seat: int) -> None:
        self._caches.pop(seat, None)


HfStore = TensorKVCache | OwnCaches


def store_of(model: Any, device: torch.device, *, seats: int, context: int) -> HfStore:
    """Return the cells where the model takes them, caches of its own otherwise."""
    if _all_dynamic(DynamicCache(config=model.config)) and not _turns_by_company(model) and _agrees(model, device):
        return TensorKVCache(device, model.dtype, seats=seats, context=context)
    return OwnCaches(device, model.config)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Where the pass under way writes and reads. `foreign` [rows, 1, extent, 1]: the cells that are not a row's own;
    `alone`: the seat of the only row, all of whose cells are its own.
    """

    seats: torch.Tensor
    cells: torch.Tensor
    foreign: torch.Tensor
    extent: int
    alone: int | None

    @classmethod
    def of_nothing(cls, device: torch.device) -> _Pass:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(none, none, none, 0, None)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, as transformers asks for them. Masks and positions are given to it, not taken."""

    is_sliding = False

    def __init__(self, cells: TensorKVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Any = None
        self.values: Any = None
        self._cells = cells

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._cells.empty(key_states), self._cells.empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._cells.exchange(self.keys, key_states), self._cells.exchange(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002  named by transformers
        raise TypeError("the mask is given: a model that makes its own takes no cells")

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _captured(compute: Compute, inputs: Sequence[torch.Tensor], device: torch.device) -> Compute:
    """Record the kernels of one pass on CUDA; a replay launches them all at once. What cannot be recorded runs as it is.

    Warming up writes the same keys and values to the same cells that the replay writes.
    """
    held = [tensor.clone() for tensor in inputs]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute(*held)
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.device(device), torch.cuda.graph(graph):
            output = compute(*held)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return compute

    def replayed(*now: torch.Tensor) -> torch.Tensor:
        for tensor, value in zip(held, now, strict=True):
            tensor.copy_(value)
        graph.replay()
        return output

    return replayed


def _agrees(model: Any, device: torch.device) -> bool:
    """Return whether two prompts of unlike length, side by side in cells, come out as each does without any cache."""
    cells = TensorKVCache(device, model.dtype, seats=len(PROBE_TOKENS), context=max(map(len, PROBE_TOKENS)))

    def last(**inputs: Any) -> torch.Tensor:
        return model(**inputs, logits_to_keep=1).logits[:, -1].float()  # type: ignore[no-any-return]

    long, short = PROBE_TOKENS
    with suppress(BackendError), failing("the model takes no cells"), torch.inference_mode():
        cells.run([Part(0, 0, long[:3], 0)], last)
        together = cells.run([Part(0, 3, long[3:], 0), Part(1, 0, short, 0)], last)
        alone = torch.cat([last(input_ids=torch.tensor([tokens], device=device)) for tokens in PROBE_TOKENS])
        share_max = PROBE_SHARE_MAX.get(model.dtype, PROBE_SHARE_MAX_HALF)
        return bool((together - alone).abs().max() <= share_max * alone.std())
    return False


def _all_dynamic(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _turns_by_company(model: Any) -> bool:
    ropes = (getattr(module, "rope_type", None) for module in model.modules())
    kinds = {kind for rope in ropes for kind in (rope.values() if isinstance(rope, dict) else [rope])}
    return bool(kinds & SHARED_ROPES)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

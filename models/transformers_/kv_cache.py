"""The KV cache of several prompts in torch. Knows only tensors, no text and no scheduling.

`TensorKVCache` holds every prompt in a slot of its own, in memory that never moves: [slots, heads, context + 1, width]
for keys and for values of every layer, at worst `slots x context` times the size of one token (on a CPU only written
memory is ever committed). Rows of one pass are one call of the model, padded on the left to the longest, under an
explicit mask. A model that this does not suit (sliding windows, recurrent states, its own positions) has
`DynamicKVCaches`: one cache a prompt, one row a call. Which one applies is tested when the model is loaded.
"""

from __future__ import annotations

import warnings
from collections import Counter
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

from sds.models.cache.kv_cache import BatchRow
from sds.models.protocol import BackendError
from sds.models.transformers_.loading import failing

EXTENT_MIN = 512  # positions that a pass of fixed shape reads at least, for fewer shapes and graphs
STATIC_TOKENS = (1, 8, 32, 64, 128, 256, 512)  # lengths that a row of such a pass is padded to
STATIC_AREA_MAX = 512  # rows x tokens of such a pass; with more, computing takes longer than starting the kernels
FORKS_STEP = 8
GRAPHS_MAX = 96
CAPTURE_AT = 2  # a shape is captured at its second use
WARM_UPS = 3
PROBE_TOKENS = ((1, 2, 3, 4, 5), (6, 7, 8))
PROBE_SHARE_MAX = {torch.float32: 1e-3}  # permitted difference, by the logits' spread; half precision is noisier
PROBE_SHARE_MAX_HALF = 0.25
SHARED_ROPES = {"dynamic", "longrope"}  # these depend on the longest row of a batch

Forward = Callable[..., torch.Tensor]  # takes the number of outputs wanted, and the model's inputs by name
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TensorKVCache:
    """Slots of one size. Each can be truncated and copied, and rows of several slots are one call."""

    batched = True

    def __init__(self, device: torch.device, dtype: torch.dtype, *, slots: int, context: int) -> None:
        self.static = device.type == "cuda"  # whether passes have few shapes, each captured once
        self._device, self._dtype, self._slots, self._context = device, dtype, slots, context
        self._written = 0
        self._pass = _Pass.of_nothing(device)
        make: Any = partial(_Layer, self)
        self._cache: Any = Cache(layer_class_to_replicate=make)
        self._graphs: dict[_Shape, Compute] = {}
        self._seen: Counter[_Shape] = Counter()
        self._graph_pool: Any = None

    def run(self, rows: Sequence[BatchRow], forward: Forward) -> torch.Tensor:
        """Call `forward` on all rows, the same one every time; return [rows, at least the outputs wanted, ...]."""
        longest, outputs = max(len(row.tokens) for row in rows), max(row.outputs for row in rows)
        extent = max(row.position + len(row.tokens) for row in rows)
        self._written = max(self._written, extent)
        if self.static and (shape := _Shape.of(len(rows), longest, extent, outputs, self._context)):
            return self._run_static(rows, forward, shape)
        alone = rows[0].slot if len(rows) == 1 else None
        inputs = self._inputs(rows, len(rows), longest)
        return self._compute(*inputs, extent=extent, alone=alone, forward=partial(forward, outputs))

    def truncate(self, _slot: int, _position: int, _surplus: int) -> bool:
        """Return True: positions beyond a prompt's end are masked and overwritten."""
        return True

    def read_block(self, slot: int, start: int, end: int) -> tuple[list[torch.Tensor], int]:
        kv_block = [layer[slot, :, start:end].clone() for layer in self._stored()]
        return kv_block, sum(tensor.nbytes for tensor in kv_block)

    def write_block(self, slot: int, start: int, kv_block: list[torch.Tensor]) -> None:
        end = start + kv_block[0].shape[1]
        self._written = max(self._written, end)
        for layer, tensor in zip(self._stored(), kv_block, strict=True):
            layer[slot, :, start:end] = tensor

    def fork(self, source: int, target: int, tokens: int) -> None:
        self._grow(target + 1)
        for layer in self._stored():
            layer[target, :, :tokens] = layer[source, :, :tokens]

    def free(self, _slot: int) -> None:
        """Do nothing: memory is overwritten by the next prompt or fork."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for one position more than the context: padding is written there, and never read."""
        heads, width = like.shape[1], like.shape[3]
        return torch.empty((self._slots, heads, self._context + 1, width), dtype=like.dtype, device=like.device)

    def exchange(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write `new`, shape [rows, heads, tokens, width]; return all that the pass reads, [rows, heads, extent, width].

        Positions that are not a row's own read as zero: an earlier prompt may have left NaN there.
        """
        now = self._pass
        stored[now.slots[:, None], :, now.positions] = new.transpose(1, 2)
        read = stored[:, :, : now.extent]
        if now.alone is not None:
            return read[now.alone : now.alone + 1]
        return read.index_select(0, now.slots).masked_fill_(now.foreign, 0)

    def _stored(self) -> list[torch.Tensor]:
        return [stored for layer in self._cache.layers for stored in (layer.keys, layer.values)]

    def _grow(self, slots: int) -> None:
        """Make room for several forks at once, because this moves all that is written and invalidates captured graphs."""
        if slots <= self._slots:
            return
        wanted = max(slots, self._slots + FORKS_STEP)
        self._graphs.clear()
        self._graph_pool = None  # torch frees it with the last graph, and does not capture into it again
        for layer in self._cache.layers:  # moved layers stay: if memory runs out, a later fork continues there
            layer.keys, layer.values = self._moved(layer.keys, wanted), self._moved(layer.values, wanted)
        self._slots = wanted

    def _moved(self, stored: torch.Tensor, slots: int) -> torch.Tensor:
        if len(stored) >= slots:
            return stored
        larger = stored.new_empty((slots, *stored.shape[1:]))
        larger[: len(stored), :, : self._written] = stored[:, :, : self._written]
        return larger

    def _inputs(
        self, rows: Sequence[BatchRow], count: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return slots [count], tokens and their positions [count, longest]; -1 is the position of padding."""
        slots, ids = np.zeros(count, np.int64), np.zeros((count, longest), np.int64)
        at = np.full((count, longest), -1, np.int64)
        for n, row in enumerate(rows):
            slots[n], start = row.slot, longest - len(row.tokens)
            ids[n, start:] = row.tokens
            at[n, start:] = np.arange(row.position, row.position + len(row.tokens))
        found = (torch.from_numpy(array).to(self._device) for array in (slots, ids, at))
        return next(found), next(found), next(found)

    def _compute(
        self,
        slots: torch.Tensor,
        ids: torch.Tensor,
        at: torch.Tensor,
        *,
        extent: int,
        alone: int | None,
        forward: Forward,
    ) -> torch.Tensor:
        """Run the model. Only tensors control this function, so that it can be captured."""
        own = torch.arange(extent, device=self._device) <= at[:, :, None]  # [rows, tokens, extent]
        mask = torch.zeros(own.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(~own, torch.finfo(self._dtype).min)[:, None]
        positions = torch.where(at < 0, self._context, at)
        self._pass = _Pass(slots, positions, ~own[:, None, -1, :, None], extent, alone)
        return forward(input_ids=ids, position_ids=at.clamp(min=0), attention_mask=mask, past_key_values=self._cache)

    def _run_static(self, rows: Sequence[BatchRow], forward: Forward, shape: _Shape) -> torch.Tensor:
        """Run with all sizes rounded up: one graph serves many passes, and its rows and tokens of padding affect nothing."""
        inputs = self._inputs(rows, shape.rows, shape.tokens)
        compute = self._graphs.get(shape)
        if compute is None:
            compute = partial(self._compute, extent=shape.extent, alone=None, forward=partial(forward, shape.outputs))
            self._seen[shape] += 1
            if self._device.type == "cuda" and self._seen[shape] >= CAPTURE_AT and len(self._graphs) < GRAPHS_MAX:
                compute = self._graphs[shape] = captured(compute, inputs, self._device, self._pool())
        return compute(*inputs)[: len(rows)]

    def _pool(self) -> Any:
        """Return the memory that all graphs share: the output of one is read before the next is replayed."""
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        return self._graph_pool


class DynamicKVCaches:
    """One of transformers' own caches for each prompt: any model, one row a call, a fork is a whole copy."""

    batched = False

    def __init__(self, device: torch.device, config: Any) -> None:
        self._device, self._config = device, config
        self._caches: dict[int, DynamicCache] = {}

    def run(self, rows: Sequence[BatchRow], forward: Forward) -> torch.Tensor:
        """Call `forward` on the only row."""
        (row,) = rows
        cache = self._caches.setdefault(row.slot, DynamicCache(config=self._config))
        return forward(
            row.outputs, input_ids=torch.tensor([list(row.tokens)], device=self._device), past_key_values=cache
        )

    def truncate(self, slot: int, position: int, surplus: int) -> bool:
        """Return whether the cache could be truncated. A sliding window has lost the positions that it would need again."""
        cache = self._caches.get(slot)
        if cache is None or not position or not _all_dynamic(cache):
            return False
        cache.crop(-surplus)
        return True

    def read_block(self, slot: int, _start: int, _end: int) -> tuple[DynamicCache, int]:
        """Return all that the slot holds: windows and states cannot be taken apart."""
        whole = deepcopy(self._caches[slot])
        tensors = [held for layer in whole.layers for held in vars(layer).values() if isinstance(held, torch.Tensor)]
        return whole, sum(held.nbytes for held in tensors)

    def write_block(self, slot: int, _start: int, kv_block: DynamicCache) -> None:
        self._caches[slot] = deepcopy(kv_block)

    def fork(self, source: int, target: int, _tokens: int) -> None:
        if source in self._caches:
            self._caches[target] = deepcopy(self._caches[source])

    def free(self, slot: int) -> None:
        self._caches.pop(slot, None)


HfKVCache = TensorKVCache | DynamicKVCaches


def kv_cache_for(model: Any, device: torch.device, *, slots: int, context: int) -> HfKVCache:
    """Return a cache for rows of several prompts in one call where the model suits it, else one cache a prompt."""
    if _all_dynamic(DynamicCache(config=model.config)) and not _rope_depends_on_batch(model) and _agrees(model, device):
        return TensorKVCache(device, model.dtype, slots=slots, context=context)
    return DynamicKVCaches(device, model.config)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes that a pass is rounded up to: rows, tokens of a row, positions read, outputs of a row."""

    rows: int
    tokens: int
    extent: int
    outputs: int

    @classmethod
    def of(cls, rows: int, longest: int, extent: int, outputs: int, context: int) -> _Shape | None:
        """Return the smallest shape that holds such a pass, or None where the pass is too large for a fixed one."""
        tokens = next((tokens for tokens in STATIC_TOKENS if tokens >= longest), None)
        if tokens is None or _power_of_two(rows) * tokens > max(STATIC_AREA_MAX, _power_of_two(rows)):
            return None
        wanted = _power_of_two(outputs) if outputs else 0
        return cls(
            _power_of_two(rows), tokens, min(max(EXTENT_MIN, _power_of_two(extent)), context), min(wanted, tokens)
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """Where the current pass writes and reads. `foreign` [rows, 1, extent, 1]: the positions that are not a row's own;
    `alone`: the slot of the only row, all of whose positions are its own.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    foreign: torch.Tensor
    extent: int
    alone: int | None

    @classmethod
    def of_nothing(cls, device: torch.device) -> _Pass:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(none, none, none, 0, None)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values in the form of transformers. It gets masks and positions, and does not make them."""

    is_sliding = False

    def __init__(self, kv_cache: TensorKVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Any = None
        self.values: Any = None
        self._kv_cache = kv_cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._kv_cache.empty(key_states), self._kv_cache.empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._kv_cache.exchange(self.keys, key_states), self._kv_cache.exchange(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002  named by transformers
        raise TypeError("the mask is given: a model that makes its own mask does not support slots")

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def captured(compute: Compute, inputs: Sequence[torch.Tensor], device: torch.device, pool: Any) -> Compute:
    """Record the kernels of one pass on CUDA, so that a replay launches all at once. A pass that cannot be recorded
    runs as it is, with a warning: it is slower by far.

    Warming up writes the same keys and values to the same positions as the replay.
    """
    held = [tensor.clone() for tensor in inputs]
    try:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute(*held)
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool):
            output = compute(*held)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = (str(error).splitlines() or ["unknown cause"])[0]
        warnings.warn(
            f"some passes run much slower, because they cannot be captured in a CUDA graph: {why}", stacklevel=2
        )
        return compute

    def replayed(*now: torch.Tensor) -> torch.Tensor:
        for tensor, value in zip(held, now, strict=True):
            tensor.copy_(value)
        graph.replay()
        return output

    return replayed


def _agrees(model: Any, device: torch.device) -> bool:
    """Return whether two prompts of different lengths, side by side in slots, give the logits of each without any cache."""
    kv_cache = TensorKVCache(device, model.dtype, slots=len(PROBE_TOKENS), context=max(map(len, PROBE_TOKENS)))

    def last(_outputs: int = 1, **inputs: Any) -> torch.Tensor:
        return model(**inputs, logits_to_keep=1).logits[:, -1].float()  # type: ignore[no-any-return]

    long, short = PROBE_TOKENS
    with suppress(BackendError), failing("the model does not support slots"), torch.inference_mode():
        kv_cache.run([BatchRow(0, 0, long[:3], 0)], last)
        together = kv_cache.run([BatchRow(0, 3, long[3:], 0), BatchRow(1, 0, short, 0)], last)
        alone = torch.cat([last(input_ids=torch.tensor([tokens], device=device)) for tokens in PROBE_TOKENS])
        share_max = PROBE_SHARE_MAX.get(model.dtype, PROBE_SHARE_MAX_HALF)
        return bool((together - alone).abs().max() <= share_max * alone.std())
    return False


def _all_dynamic(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _rope_depends_on_batch(model: Any) -> bool:
    ropes = (getattr(module, "rope_type", None) for module in model.modules())
    kinds = {kind for rope in ropes for kind in (rope.values() if isinstance(rope, dict) else [rope])}
    return bool(kinds & SHARED_ROPES)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

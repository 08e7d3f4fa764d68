"""Keys and values as OpenVINO's graph takes them: the past of each tree of a batch, as long as the longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import ArrayKVCache
from sds.models.openvino_.batch import PAST_TOKENS, Batch

PADDED_BYTES_MAX = 256 << 20  # what the pasts of batches of several trees take besides, once there was such a batch


class PaddedKVCache(ArrayKVCache):
    """A slot holds a little more than the context, so that any past is padded to a multiple of PAST_TOKENS."""

    def __init__(self, shape: tuple[int, int, int], kind: type[Any], slots: int) -> None:
        planes, tokens, width = shape
        super().__init__((planes, tokens + PAST_TOKENS, width), kind, slots)
        self._padded = np.empty(0, kind)
        self.past_tokens_max = PADDED_BYTES_MAX // (planes * width * self._padded.itemsize)

    def past(self, batch: Batch) -> Sequence[NDArray[Any]]:
        """Return keys and values of what stands before the trees of a batch: of each layer in turn [trees, past, width].

        Beyond a tree's own position lies whatever was written there: numbers, which are masked.
        """
        slots = [self.memory(tree.root) for tree in batch.trees]
        if len(slots) == 1:
            return list(slots[0][:, None, : batch.past])
        planes, _, width = self.shape
        shape = planes, len(slots), batch.past, width
        if self._padded.size < (size := int(np.prod(shape))):
            self._padded = np.empty(0, self.kind)  # not both at once
            self._padded = np.empty(size, self.kind)
        padded = self._padded[:size].reshape(shape)
        for n, slot in enumerate(slots):
            padded[:, n] = slot[:, : batch.past]
        return list(padded)

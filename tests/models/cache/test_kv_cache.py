"""Keys and values of slots: what is written late, or never, reads as if it had been written at once."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from sds.models.cache.kv_cache import ArrayKVCache, BatchRow
from tests.scale import scale, seeded

PLANES, CONTEXT, WIDTH, SLOTS = 2, 40, 3, 3
FINITE = np.zeros((1, 1), np.float32)


class Model:
    """A KV cache, and what each of its slots must hold: a number for each token."""

    def __init__(self, rng: Random) -> None:
        self.cache = ArrayKVCache((PLANES, CONTEXT, WIDTH), np.float32, SLOTS)
        self.holds: dict[int, list[float]] = {slot: [] for slot in range(SLOTS)}
        self.origins = {slot: slot for slot in range(SLOTS)}
        self.rng, self.answer = rng, np.zeros((PLANES, CONTEXT, WIDTH), np.float32)

    def call(self) -> None:
        """Append to some slots in one call, which writes over what the call before answered."""
        slots = [slot for slot in self.holds if len(self.holds[slot]) < CONTEXT and self.rng.random() < 0.5]
        counts = {slot: self.rng.randint(1, min(4, CONTEXT - len(self.holds[slot]))) for slot in slots}
        places = {slot: self.cache.prefix(slot, len(self.holds[slot])) for slot in slots}
        self.cache.flush()
        for slot, (root, position) in places.items():
            assert self.holds[slot][:position] == self.cache.memory(root)[0, :position, 0].tolist()
        self.answer[:], start = -1.0, 0
        for slot, count in counts.items():
            if start + count > CONTEXT:
                return
            new, path = self.answer[:, start : start + count], range(start, start + count)
            new[:] = [[self.rng.random()] for _ in range(count)]
            self.cache.append(BatchRow(slot, len(self.holds[slot]), [0] * count, 0), self.answer, path, FINITE)
            self.holds[slot] += new[0, :, 0].tolist()
            start += count

    def fork(self) -> None:
        source, target = self.rng.choice(list(self.holds)), SLOTS + len(self.holds)
        target = next(slot for slot in range(SLOTS, target + 1) if slot not in self.holds)
        self.cache.fork(source, target, len(self.holds[source]))
        self.holds[target], self.origins[target] = [*self.holds[source]], self.origins[source]

    def drop(self) -> None:
        forks = [slot for slot in self.holds if slot >= SLOTS]
        if forks:
            fork = self.rng.choice(forks)
            self.cache.free(fork)
            del self.holds[fork], self.origins[fork]

    def truncate(self) -> None:
        """Let a slot go on from its beginning: its forks go first."""
        slot = self.rng.randrange(SLOTS)
        for fork in [fork for fork, origin in self.origins.items() if origin == slot and fork >= SLOTS]:
            self.cache.free(fork)
            del self.holds[fork], self.origins[fork]
        position = self.rng.randint(0, len(self.holds[slot]))
        self.cache.truncate(slot, position, len(self.holds[slot]) - position)
        del self.holds[slot][position:]
        if self.rng.random() < 0.5 and position < CONTEXT:
            self.cache.write_block(slot, position, np.full((PLANES, 1, WIDTH), 0.5, np.float32))
            self.holds[slot].append(0.5)

    def read(self) -> None:
        slot = self.rng.choice(list(self.holds))
        block, size = self.cache.read_block(slot, 0, len(self.holds[slot]))
        assert size == block.nbytes
        assert all((block[plane, :, at] == self.holds[slot]).all() for plane in range(PLANES) for at in range(WIDTH))


@pytest.mark.parametrize("seed", range(scale(60, 4_000)))
def test_whatever_is_forked_truncated_and_freed_every_slot_holds_what_it_was_given(seed: int) -> None:
    rng = seeded(seed)
    model = Model(rng)
    for _ in range(60):
        rng.choice([model.call, model.call, model.call, model.fork, model.drop, model.truncate, model.read])()


def test_what_a_slot_no_longer_holds_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied = Model(seeded(1)), list[int]()
    monkeypatch.setattr(model.cache, "_write", lambda slot, *_: copied.append(slot))
    answer, two = np.ones((PLANES, 2, WIDTH), np.float32), range(2)
    model.cache.fork(0, SLOTS, 0)
    model.cache.append(BatchRow(0, 0, [1, 2], 0), answer, two, FINITE)
    model.cache.append(BatchRow(SLOTS, 0, [1, 2], 0), answer, two, FINITE)
    model.cache.free(SLOTS)
    model.cache.truncate(0, 0, 2)
    model.cache.flush()
    assert [] == copied

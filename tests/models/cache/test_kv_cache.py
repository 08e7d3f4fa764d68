"""Keys and values of seats: what is copied late, or never, reads as if it had been copied at once."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from sds.models.cache.kv_cache import ArrayKVCache
from tests.scale import scale, seeded

PLANES, CONTEXT, WIDTH, SLOTS = 2, 40, 3, 3


class Told:
    """Cells, and beside them what each seat must hold: a number for each token."""

    def __init__(self, rng: Random) -> None:
        self.cells = ArrayKVCache((PLANES, CONTEXT, WIDTH), np.float32, SLOTS)
        self.holds: dict[int, list[float]] = {seat: [] for seat in range(SLOTS)}
        self.origins = {seat: seat for seat in range(SLOTS)}
        self.rng, self.answer = rng, np.zeros((PLANES, CONTEXT, WIDTH), np.float32)

    def call(self) -> None:
        """Append to some seats in one call, which writes over what the call before answered."""
        seats = [seat for seat in self.holds if len(self.holds[seat]) < CONTEXT and self.rng.random() < 0.5]
        counts = {seat: self.rng.randint(1, min(4, CONTEXT - len(self.holds[seat]))) for seat in seats}
        places = {seat: self.cells.place(seat, len(self.holds[seat])) for seat in seats}
        self.cells.settle()
        for seat, (root, position) in places.items():
            assert self.holds[seat][:position] == self.cells.seat(root)[0, :position, 0].tolist()
        self.answer[:], start = -1.0, 0
        for seat, count in counts.items():
            if start + count > CONTEXT:
                return
            new = self.answer[:, start : start + count]
            new[:] = [[self.rng.random()] for _ in range(count)]
            self.cells.note(seat, len(self.holds[seat]), new)
            self.holds[seat] += new[0, :, 0].tolist()
            start += count

    def fork(self) -> None:
        source, target = self.rng.choice(list(self.holds)), SLOTS + len(self.holds)
        target = next(seat for seat in range(SLOTS, target + 1) if seat not in self.holds)
        self.cells.fork(source, target, len(self.holds[source]))
        self.holds[target], self.origins[target] = [*self.holds[source]], self.origins[source]

    def drop(self) -> None:
        forks = [seat for seat in self.holds if seat >= SLOTS]
        if forks:
            fork = self.rng.choice(forks)
            self.cells.forget(fork)
            del self.holds[fork], self.origins[fork]

    def begin(self) -> None:
        """Let a slot go on from its beginning: its forks go first."""
        slot = self.rng.randrange(SLOTS)
        for fork in [fork for fork, origin in self.origins.items() if origin == slot and fork >= SLOTS]:
            self.cells.forget(fork)
            del self.holds[fork], self.origins[fork]
        position = self.rng.randint(0, len(self.holds[slot]))
        self.cells.cut(slot, position, len(self.holds[slot]) - position)
        del self.holds[slot][position:]
        if self.rng.random() < 0.5 and position < CONTEXT:
            self.cells.put(slot, position, np.full((PLANES, 1, WIDTH), 0.5, np.float32))
            self.holds[slot].append(0.5)

    def take(self) -> None:
        seat = self.rng.choice(list(self.holds))
        stretch, size = self.cells.taken(seat, 0, len(self.holds[seat]))
        assert size == stretch.nbytes
        assert all((stretch[plane, :, at] == self.holds[seat]).all() for plane in range(PLANES) for at in range(WIDTH))


@pytest.mark.parametrize("seed", range(scale(400, 4_000)))
def test_whatever_is_forked_cut_and_forgotten_every_seat_holds_what_it_was_given(seed: int) -> None:
    rng = seeded(seed)
    told = Told(rng)
    for _ in range(60):
        rng.choice([told.call, told.call, told.call, told.fork, told.drop, told.begin, told.take])()


def test_what_a_slot_forgets_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    told, copied = Told(seeded(1)), list[int]()
    monkeypatch.setattr(told.cells, "_keep", lambda seat, *_: copied.append(seat))
    answer = np.ones((PLANES, 2, WIDTH), np.float32)
    told.cells.fork(0, SLOTS, 0)
    told.cells.note(0, 0, answer)
    told.cells.note(SLOTS, 0, answer)
    told.cells.forget(SLOTS)
    told.cells.cut(0, 0, 2)
    told.cells.settle()
    assert [] == copied

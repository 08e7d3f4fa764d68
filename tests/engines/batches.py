"""Decisions of a model in a few lines, each alone or several over one scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from sds.engines.request import Request
from sds.engines.scheduler import Scheduler
from sds.models.protocol import Row
from tests.engines.hashing import HashBackend, Logits, writing

FAR = 1 << 60
CONTRACTS = [[1, 2, 3], [4, 5], [6]]

Make = Callable[[Any, int], Generator[list[Row], list[Logits], tuple[int, ...]]]


def make(sections: list[list[int]], length: int, forks: int = 0) -> Make:
    return partial(writing, sections=sections, length=length, forks=forks)


def start(scheduler: Scheduler, sections: list[list[int]], length: int = 3, forks: int = 0) -> Request[tuple[int, ...]]:
    return scheduler.start(make(sections, length, forks), sections, FAR)


def alone(sections: list[list[int]], length: int = 3, forks: int = 0) -> tuple[int, ...]:
    backend = HashBackend(1)
    passes = make(sections, length, forks)(backend, 0)
    rows = next(passes)
    while True:
        try:
            rows = passes.send(backend.run(rows))
        except StopIteration as finished:
            result: tuple[int, ...] = finished.value
            return result


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def held_up(backend: HashBackend, scheduler: Scheduler, case: int = 0, length: int = 4) -> Request[tuple[int, ...]]:
    """Start one and hold its first pass up, so that what is started next waits."""
    backend.gate.clear()
    first = start(scheduler, [CONTRACTS[0], [case]], length)
    assert backend.waits.wait(10)
    return first

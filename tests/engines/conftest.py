"""One llama.cpp server for this folder, a world whose clock runs, as deadlines here are real ones, and schedulers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sds.engines.protocol import Engine
from sds.engines.scheduler import Scheduler
from sds.kernel.flow.states import Answer
from sds.pipeline import Stream
from tests.engines.hashing import HashBackend
from tests.engines.servers import LlamaServer
from tests.kernel.durable import START_MS, World

BEGAN_S = time.monotonic()


def running_ms() -> int:
    """Return the time of the tests' world, running: it starts when the contract is in force."""
    return START_MS + round((time.monotonic() - BEGAN_S) * 1000)


@pytest.fixture(scope="session")
def libraries_imported() -> None:
    """Import what the models of servers are asked with: it takes seconds, which are not those of whichever test is the first."""
    import openai  # noqa: F401
    import outlines  # noqa: F401


@pytest.fixture(scope="session")
def server(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    started = LlamaServer(tiny_path(1), tmp_path_factory.mktemp("server") / "server.log")
    started.start()
    yield started
    started.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.clock = running_ms  # type: ignore[assignment]  # a clock that nobody moves
    made.kernel = made.open_kernel()
    yield made
    made.close()


def decide(world: World, engine: Engine, name: str = "C1") -> Answer:
    return Stream(world.kernel, engine, now_ms=running_ms, sleep=time.sleep).decide(world.event(name))


@pytest.fixture(scope="session")
def tiny_gguf(tiny_path: Callable[[int], Path]) -> Path:
    return tiny_path(1)


@pytest.fixture
def batching() -> Iterator[Callable[..., Scheduler]]:
    schedulers: list[Scheduler] = []

    def open_one(backend: HashBackend, **options: Any) -> Scheduler:
        schedulers.append(Scheduler(backend, now_ms=options.pop("now_ms", lambda: 0), **options))
        return schedulers[-1]

    yield open_one
    for scheduler in schedulers:
        scheduler._backend.gate.set()  # type: ignore[attr-defined]
        scheduler.close()

"""One llama.cpp server for this folder, and a world whose clock runs: deadlines here are real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.engines.protocol import Engine
from sds.kernel.answer import Answer
from sds.stream import Stream
from tests.engines.servers import LlamaServer
from tests.kernel.durable import START_MS, World

BEGAN_S = time.monotonic()


def running_ms() -> int:
    """Return the time of the tests' world, running: it starts when the contract is in force."""
    return START_MS + round((time.monotonic() - BEGAN_S) * 1000)


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

"""Fixtures that more than one folder uses, and how random tests behave: no deadline, the failing seed printed."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from functools import cache, lru_cache

import pytest
from hypothesis import HealthCheck, settings

from sds.gates.refund import gate, labels
from sds.gates.refund.world.flights import load_flights
from sds.kernel.contract import schema
from sds.kernel.contract.yaml_lines import load_with_lines
from tests.model_fixtures import (
    embedded,
    opened,
    own_checkpoint,
    own_gguf,
    own_hf,
    own_int,
    own_vino,
    single_path,
    tiny,
    tiny_folder,
    tiny_hf,
    tiny_int,
    tiny_path,
    tiny_vino,
    vocabulary,
)
from tests.scale import limit_s, scale

__all__ = [
    "embedded",
    "opened",
    "own_checkpoint",
    "own_gguf",
    "own_hf",
    "own_int",
    "own_vino",
    "single_path",
    "tiny",
    "tiny_folder",
    "tiny_hf",
    "tiny_int",
    "tiny_path",
    "tiny_vino",
    "vocabulary",
]

# What was prepared on this machine shows in no test: each decides with the weights it names.
os.environ["SDS_CACHE"] = tempfile.mkdtemp(prefix="sds-cache-")
atexit.register(shutil.rmtree, os.environ["SDS_CACHE"], ignore_errors=True)

# A worker a core: threads of one beside it would wait for each other by spinning. Workers and what they begin inherit it.
os.environ.update(dict.fromkeys(("SDS_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))


GARBAGE = 20_000  # objects between two collections: at Python's 700 the tests spend much of their time in them
LONG = (
    "tests/decoding/test_reference",
    "tests/test_readme",
    "tests/test_storms",
    "tests/test_attack",
    "tests/test_wheel",
    "tests/benchmarks/test_card",
)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the time that a test may take grow with the size of the tests."""
    os.environ.setdefault("PYTEST_TIMEOUT", str(limit_s(int(config.getini("timeout")))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage look neither for any while modules are imported nor at them later: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else what is still open as the interpreter ends is said to be so
        gc.enable()
        gc.set_threshold(GARBAGE, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: begun last, it would keep one worker while the others have nothing."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def flights_read_once() -> Iterator[None]:
    """Read the flights of 2013 once a process: it takes over a second, a world of forty claims a hundredth of that."""
    with pytest.MonkeyPatch.context() as patched:
        read = cache(load_flights)
        patched.setattr(gate, "load_flights", read)
        patched.setattr(labels, "load_flights", read)
        yield


@pytest.fixture(scope="session", autouse=True)
def contracts_read_once() -> Iterator[None]:
    """Read the YAML of the same contract once a process: it is only looked at, and it takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schema, "load_with_lines", lru_cache(512)(load_with_lines))
        yield


settings.register_profile(
    "sds",
    max_examples=scale(40, 200),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.load_profile("sds")

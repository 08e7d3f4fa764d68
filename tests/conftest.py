"""Fixtures for several folders, settings of the test process, and Hypothesis's profile: no deadline, failures printed."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from functools import cache, lru_cache
from importlib.metadata import entry_points

import pytest
from hypothesis import HealthCheck, settings

from sds.definitions import registry
from sds.gates.fraud import gate as fraud
from sds.gates.fraud.rows import Row, rows
from sds.gates.refund import gate, labels
from sds.gates.refund.world.flights import load_flights
from sds.kernel.contract import expressions, schema
from sds.kernel.contract.expressions import check_expression
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

# Weights that were prepared on this machine affect no test: each test names its weights.
os.environ["SDS_CACHE"] = tempfile.mkdtemp(prefix="sds-cache-")
atexit.register(shutil.rmtree, os.environ["SDS_CACHE"], ignore_errors=True)

# There is a worker for each core: more threads would wait for each other by spinning. Child processes inherit this.
os.environ.update(dict.fromkeys(("SDS_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))


GARBAGE = 20_000  # objects between two garbage collections: with Python's 700 these take much of the tests' time
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
    """Set a test's time limit by the size of the tests."""
    os.environ.setdefault("PYTEST_TIMEOUT", str(limit_s(int(config.getini("timeout")))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off during the imports, and exempt the imported objects from it: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else objects still open at the interpreter's end cause warnings
        gc.enable()
        gc.set_threshold(GARBAGE, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: at the end, one would keep one worker busy while the others have none left."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def flights_read_once() -> Iterator[None]:
    """Read the flights of 2013 once a process: it takes over a second, a hundred times as long as a world of forty claims."""
    with pytest.MonkeyPatch.context() as patched:
        read = cache(load_flights)
        patched.setattr(gate, "load_flights", read)
        patched.setattr(labels, "load_flights", read)
        yield


@pytest.fixture(scope="session", autouse=True)
def worlds_made_soon() -> Iterator[None]:
    """Give a gate's demo a tenth of its claims, the first ones, and generate payments once a process: both take seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gate.ensure_world, "__kwdefaults__", {"claims": gate.CLAIMS // 10, "seed": gate.SEED})
        patched.setattr(fraud, "rows", made_rows)
        yield


@lru_cache(1)
def made_rows(part: str, *, seed: int) -> list[Row]:
    return list(rows(part, seed=seed))


@pytest.fixture(scope="session", autouse=True)
def entry_points_read_once() -> Iterator[None]:
    """Look for the installed gates once a process: it reads the metadata of every package."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "entry_points", cache(entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def contracts_read_once() -> Iterator[None]:
    """Parse the YAML of equal contracts once a process: the result is never altered, and parsing outlasts most tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schema, "load_with_lines", lru_cache(512)(load_with_lines))
        yield


@pytest.fixture(scope="session", autouse=True)
def expressions_checked_once() -> Iterator[None]:
    """Type-check equal expressions of contracts over equal types once a process: the result is never altered."""
    with pytest.MonkeyPatch.context() as patched:
        check = lru_cache(4096)(lambda text, types: check_expression(text, dict(types)))
        patched.setattr(expressions, "check_expression", lambda text, types: check(text, tuple(types.items())))
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

"""Sizes and seeds of the tests: `SDS_TEST_SCALE=full` for the full size, `SDS_TEST_SEED=N` to replay."""

from __future__ import annotations

import os
from random import Random


def scale(ci: int, full: int) -> int:
    return full if os.environ.get("SDS_TEST_SCALE", "ci") == "full" else ci


def limit_s(ci: int) -> int:
    """Return how long a test of some size, or a process that it starts, may take: `ci` seconds, sixty times that at full."""
    return scale(ci, 60 * ci)


def seeded(default: int) -> Random:
    """Return the generator of a random test; pytest shows the seed when the test fails."""
    seed = int(os.environ.get("SDS_TEST_SEED", default))
    print(f"seed {seed} (SDS_TEST_SEED={seed} replays it)")
    return Random(seed)

"""Sizes and seeds of the tests: `SDS_TEST_SCALE=full` for the full size, `SDS_TEST_SEED=N` to replay a random test."""

from __future__ import annotations

import os
from random import Random


def scale(ci: int, full: int) -> int:
    return full if os.environ.get("SDS_TEST_SCALE", "ci") == "full" else ci


def limit_s(ci: int) -> int:
    """Return the time limit of a test, or of a process that it starts: `ci` seconds, sixty times that at full size."""
    return scale(ci, 60 * ci)


def seeded(default: int) -> Random:
    """Return a random test's generator, and print its seed; pytest shows it when the test fails."""
    seed = int(os.environ.get("SDS_TEST_SEED", default))
    print(f"seed {seed} (SDS_TEST_SEED={seed} replays it)")
    return Random(seed)

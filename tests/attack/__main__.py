"""Run the attack: `python -m tests.attack [PART ...]`.

It prints a line for each figure and a JSON document last, and exits with 1 where a figure does not hold. Each part runs in
its own process and folder. `SDS_TEST_SEED=N python -m tests.attack PART` replays it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from . import crowd, executors, kills, overload, poisons, refunds, restores
from .figures import Figure
from .forks import in_child

SEED = 31
PARTS: dict[str, Callable[[Path, Random], list[Figure]]] = {
    "restores": restores.attack,
    "refunds": refunds.attack,
    "poisons": poisons.attack,
    "overload": overload.attack,
    "crowd": crowd.attack,
    "executors": executors.attack,
    "kills": kills.attack,
}


def run(part: str, seed: int) -> dict[str, object]:
    """Run one part and print its figures; return them as JSON data."""
    print(f"{part}: seed {seed} (SDS_TEST_SEED={seed} python -m tests.attack {part} replays it)", flush=True)
    began = time.monotonic()
    with TemporaryDirectory(prefix="attack-") as folder:
        try:
            figures = in_child(partial(PARTS[part], Path(folder), Random(seed)))
        except RuntimeError as error:
            figures = [Figure(f"part that came to an end: {error}", 0, 1)]
    for figure in figures:
        print(figure.line)
    took_s = round(time.monotonic() - began, 1)
    print(f"  {took_s} s", flush=True)
    found = {figure.name: figure.value for figure in figures}
    return {"holds": all(figure.holds for figure in figures), "seed": seed, "took_s": took_s, "figures": found}


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - PARTS.keys())
    if unknown:
        print(f"error: there is no part `{unknown[0]}`; parts are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    seed = int(os.environ.get("SDS_TEST_SEED", SEED))
    found = {name: run(name, seed) for name in names or PARTS}
    holds = all(part["holds"] for part in found.values())
    print(json.dumps({"scale": os.environ.get("SDS_TEST_SCALE", "ci"), "holds": holds, "parts": found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

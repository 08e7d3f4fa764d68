"""Run storms: `python -m tests.storms NAME [NAME ...] [--n N] [--store sqlite|postgresql] [--seed S]`.

It prints a line for each promise and a JSON document last, and exits with 1 where a promise is broken. Each storm runs in
its own process and folder. The command that replays it alone is printed first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.attack.figures import Figure, none
from tests.attack.forks import in_child
from tests.scale import scale

from . import ALL
from .ground import SQLITE, STORES, Ground, warm
from .servers import Server, postgresql

SEED = 34


def run(name: str, n: int, store: str, seed: int) -> dict[str, object]:
    """Run one storm and print its figures; return them as JSON data."""
    replay = f"python -m tests.storms {name} --n {n} --store {store} --seed {seed}"
    print(f"{name}: {ALL[name].what}\n  replay: {replay}", flush=True)
    began = time.monotonic()
    with TemporaryDirectory(prefix="storm-") as folder, _server(store) as server:
        try:
            figures = in_child(partial(_storm, name, Ground(Path(folder), n, store, Random(seed), server)))
        except RuntimeError as error:
            figures = [none(f"storms that came to no end: {error}", 1)]
    for figure in figures:
        print(figure.line)
    took_s = round(time.monotonic() - began, 1)
    print(f"  {took_s} s", flush=True)
    return {"holds": _hold(figures), "replay": replay, "took_s": took_s, "figures": {f.name: f.value for f in figures}}


@contextmanager
def _server(store: str) -> Iterator[Server | None]:
    if store == SQLITE:
        yield None
    else:
        with postgresql() as server:
            yield server


def _storm(name: str, ground: Ground) -> list[Figure]:
    os.environ.pop("SDS_STORE", None)
    warm(ground.folder)
    if ground.server is not None:
        os.environ["SDS_STORE"] = ground.server.url
    return ALL[name].storm(ground)


def _hold(figures: list[Figure]) -> bool:
    return bool(figures) and all(figure.holds for figure in figures)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storms")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--n", type=int, default=0, help="how much of it; each storm has a size of its own")
    parser.add_argument("--store", choices=STORES, default="sqlite")
    parser.add_argument("--seed", type=int, default=SEED)
    said = parser.parse_args(given)
    unknown = [name for name in said.names if name not in ALL]
    if unknown:
        print(f"error: there is no storm `{unknown[0]}`; storms are: {', '.join(ALL)}", file=sys.stderr)
        return 2
    wanted = said.names or [name for name, each in ALL.items() if said.store in each.stores]
    found = {name: run(name, said.n or scale(*ALL[name].sizes), said.store, said.seed) for name in wanted}
    holds = all(each["holds"] for each in found.values())
    print(json.dumps({"store": said.store, "seed": said.seed, "holds": holds, "storms": found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

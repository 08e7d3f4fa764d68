"""Stopping a process at any step of its work, and what must hold of a world afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.storage.store import Store
from tests.kernel.durable import World, counters, witness
from tests.kernel.faults import Crash, Faults, failing
from tests.scale import scale, seeded
from tests.stores.opened import Chosen, opened_store
from tests.stores.records import follow

STEPS_MAX = 3_000
RECORD = "kernel.db"


_MADE: dict[tuple[str, str], Path] = {}


def made_once(make: Callable[[Path], World], folders: pytest.TempPathFactory, name: str) -> Path:
    """Return the folder of a world that is made once for each store, to be copied. `name`: the module's that asks."""
    key = name, Chosen.kind
    if key not in _MADE:
        _MADE[key] = folders.mktemp("template")
        make(_MADE[key]).close()
    return _MADE[key]


def copied(template: Path, folder: Path) -> Path:
    """Put a folder as it was made once in the place of `folder`: making it is not what is tested."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    follow(template / RECORD, folder / RECORD)
    return folder


def crashing(world: World, work: Callable[[Kernel], object], faults: Faults) -> object:
    """Do `work` in a process that stops at `faults.at`; return what it came to know, or None when it stopped."""
    world.rail.live_through(faults)
    world.tickets.live_through(faults)
    try:
        return work(world.open_kernel(opened_store(world.path, connect=failing(faults), witness=witness())))
    except Crash:
        return None
    finally:
        faults.bury()
        world.rail.live_through(Faults())
        world.tickets.live_through(Faults())


def every_step(world: Callable[[], World], work: Callable[[World, Faults], bool], *, stride: int = 1) -> int:
    """Stop at each step until a run is not stopped; return how many statements, reads and orders there were.

    In CI after each `stride`-th statement, read or order, from a seeded one on, and not once more before the next:
    nothing is written between the two.
    """
    first = 1 + seeded(48).randrange(stride)
    for at in range(scale(2 * first, 1), STEPS_MAX, scale(2 * stride, 1)):
        faults = Faults(at=at)
        made = world()
        try:
            if work(made, faults):
                return faults.done
        except AssertionError as error:
            raise AssertionError(f"stopped at step {at}, {faults.steps[-1]}: {error}") from error
        finally:
            made.close()
    raise AssertionError("this never ends")


def check(world: World, store: Store, answer: Answer) -> None:
    paid = world.rail.paid()
    assert len(paid) <= 1, "two payouts for one event"
    settled = [row[0] for row in store.rows("SELECT dfid FROM execution_log WHERE status = 'SUCCESS'")]
    assert [dfid for dfid, *_ in paid] == settled, "the rail and the record disagree"
    assert not answer.pending
    assert (answer.execution == "SUCCESS") == bool(paid)
    assert () == verify.verify(store).faults
    if answer.execution != "UNKNOWN":
        assert [] == store.rows("SELECT * FROM reservations WHERE status = 'live'")
        spent = sum(amount for *_, amount in paid)
        assert {spent} | {0} >= {used for name, used in counters(store) if name.startswith("claims/")}

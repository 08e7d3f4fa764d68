"""End a process before or after its N-th I/O step, for each N, and once more during recovery.

Each story runs in its own process, over a copy of the files: the first decision of a gate, which makes its record and its
keys; orders that are lost, or lose their reply; a declined order; new keys; a restored backup.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path
from random import Random

from sds.host import paths
from sds.host.backup import back_up
from sds.host.restoring import restore
from sds.host.rotation import rotate
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.attack.figures import Figure, added, measured
from tests.attack.forks import fork, in_child, in_children
from tests.attack.outside import Bank
from tests.attack.testbed import Testbed, contract, settle

from .ground import CALM_MS, SQLITE, Bed, Ground, bed_of, decide, reckon
from .steps import DEAD, Steps

WHAT = "a process ends at each of its I/O steps, and again at one of its recovery"
EVENTS = 2
AT_ONCE = 2

Story = Callable[[Testbed], object]


class UnluckyBank(Bank):
    """A bank with one misfortune: it loses the reply after paying, loses the order, or declines a key's first order."""

    def __init__(self, bed: Testbed, misfortune: str) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock)
        self._misfortune = misfortune

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if self._misfortune == "declines" and self.lookup(key, deadline_s).status == "absent":
            return self.pay(intent, key, 1, "rejected")
        if self._misfortune == "loses the order":
            return Receipt("unknown")
        receipt = super().dispatch(intent, key, deadline_s)
        return Receipt("unknown") if self._misfortune == "loses the reply" else receipt


def _decided(bed: Testbed, misfortune: str = "") -> None:
    with bed.gate(executor=UnluckyBank(bed, misfortune)) as gate:
        decide(gate, bed, 0)


def _rotated(bed: Testbed) -> None:
    with closing(paths.open_record(bed.own)) as store:
        rotate(bed.own, store, who="ada", reason="a storm", now_ms=bed.clock())
    _decided(bed)


def _put_back(bed: Testbed) -> None:
    """Make a backup unless there is one, delete the record, and restore it."""
    to = bed.folder / "copy"
    if not to.exists():
        with closing(paths.open_record(bed.own)) as store:
            back_up(store, bed.own, to, gate="attack", with_key=True, now_ms=bed.clock())
    (bed.own / "decisions.db").unlink(missing_ok=True)
    restore(to, bed.own, gate="attack")


# Each story, and whether the gate has decided an event before
STORIES: dict[str, tuple[Story, bool]] = {
    "the first decision of a gate": (_decided, False),
    "a decision": (_decided, True),
    "a lost reply": (partial(_decided, misfortune="loses the reply"), True),
    "a lost order": (partial(_decided, misfortune="loses the order"), True),
    "an order declined": (partial(_decided, misfortune="declines"), True),
    "new keys": (_rotated, True),
    "a backup put back": (_put_back, True),
}


def storm(ground: Ground) -> list[Figure]:
    figures, stops = list[Figure](), 0
    for number, name in enumerate(STORIES):
        story, begun = STORIES[name]
        if story is _put_back and ground.store != SQLITE:
            continue  # this story deletes the record's file
        bed = bed_of(ground, contract(ttl_ms=5_000, dispatch_ms=2_000), f"story-{number}")
        bed.open_accounts(range(EVENTS))
        steps = _steps_of(bed, story, begun=begun)
        each = max(1, ceil(steps * len(STORIES) / ground.n))
        points = range(1 + ground.rng.randrange(each), steps + 1, each)
        stops += len(points)
        works = [partial(_struck, bed, name, at, Random(ground.rng.random())) for at in points]
        found = in_children(works, AT_ONCE)
        figures = added([figures, *found]) if figures else added(found)
        print(f"  {name}: {steps} steps, stopped at {len(points)} of them", flush=True)
    return [measured("steps stopped at", stops), *figures]


def _begin(bed: Testbed) -> None:
    with bed.gate() as gate:
        settle(gate, bed.event(1))


def _copy(bed: Testbed, to: Path, *, begun: bool) -> Bed:
    """Return a copy of a bed in which nothing is decided yet, or, with `begun`, one event."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(bed.folder, to)
    copy = Bed(to, terms=bed.terms)
    if begun:
        in_child(partial(_begin, copy))
    return copy


def _steps_of(bed: Testbed, story: Story, *, begun: bool) -> int:
    """Return the number of a story's steps where nothing stops it."""
    copy = _copy(bed, bed.folder.with_name(f"{bed.folder.name}-counted"), begun=begun)

    def counted() -> int:
        steps = Steps(0).installed()
        story(copy)
        return steps.count

    return in_child(counted)


def _struck(bed: Testbed, name: str, at: int, rng: Random) -> list[Figure]:
    """Stop a story at one step and its recovery at another; return the figures afterwards."""
    story, begun = STORIES[name]
    copy = _copy(bed, bed.folder.with_name(f"{bed.folder.name}-{at}"), begun=begun)
    status = _run_until(copy, story, at)
    if status == DEAD:
        if story is _put_back:  # a record that is gone can only be restored
            in_child(partial(_put_back, copy))
        copy.clock.ahead_ms += CALM_MS
        _run_until(copy, _recovered, 1 + rng.randrange(200))
    found = reckon(copy, range(EVENTS))
    if not all(figure.holds for figure in found):
        print(f"  {name}: stopped at step {at}")
    shutil.rmtree(copy.folder)
    return found


def _recovered(bed: Testbed) -> None:
    with bed.gate() as gate:
        gate.recover()
        settle(gate, bed.event(0))


def _run_until(bed: Testbed, story: Story, at: int) -> int:
    """Run a story in a process that ends at step `at`; return its exit code, 0 or DEAD. Raises RuntimeError for others."""

    def stopped() -> None:
        Steps(at).installed()
        story(bed)

    _, status = os.waitpid(fork(stopped), 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, DEAD):
        raise RuntimeError(f"a process that was to be stopped at step {at} failed by itself: {code}")
    return code

"""Stop a process (SIGSTOP) at any of its steps for longer than its lease, and let it go on once another has taken over.

A process that is stopped between its last look at the clock and the wire can pay after its deadline; nothing prevents that.
So what counts is the moment at which the executor is entered.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from random import Random

from sds.kernel.errors import StoreError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.attack.figures import Figure, added, measured, none
from tests.attack.forks import fork, in_child, in_children
from tests.attack.outside import Bank
from tests.attack.testbed import Testbed, contract

from .ground import Ground, bed_of, decide, reckon
from .steps import Steps

WHAT = "a holder is stopped past its lease, another takes over, the holder goes on"
LEASE_MS = 300
DEADLINE_MS = 140  # at most half a lease: the rest is for the order
SLACK_MS = 50  # between noting the deadline and starting the decision; a stop is far longer
STEPS = 150  # more than a decision has


class Timed(Bank):
    """A bank that first writes down when it is entered, and by which process."""

    def __init__(self, bed: Testbed) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock)
        self._entries = bed.folder / "entered"

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        entered_ms = self._now_ms()
        with self._entries.open("a") as file:
            file.write(f"{entered_ms} {os.getpid()}\n")
        return super().dispatch(intent, key, deadline_s)


def storm(ground: Ground) -> list[Figure]:
    works = [partial(_one, ground, number, Random(ground.rng.random())) for number in range(ground.n)]
    return added(in_children(works, 2))


def _one(ground: Ground, number: int, rng: Random) -> list[Figure]:
    bed = bed_of(ground, contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2), f"bed{number}")
    bed.open_accounts([0])
    in_child(lambda: bed.gate().close())
    holder = fork(partial(_hold, bed, 1 + rng.randrange(STEPS)))
    stopped = _stopped(holder)
    if stopped:
        time.sleep((LEASE_MS + rng.randrange(LEASE_MS)) / 1000)
    other = fork(partial(_take_over, bed))
    if stopped:
        time.sleep(rng.random() * 0.2)
        os.kill(holder, signal.SIGCONT)
        os.waitpid(holder, 0)
    os.waitpid(other, 0)
    deadline_ms = int((bed.folder / "deadline").read_text())
    late = [at_ms for at_ms, pid in _entered(bed) if pid == holder and at_ms > deadline_ms + SLACK_MS]
    found = reckon(bed, [0])
    return [
        measured("holders stopped", int(stopped)),
        none("orders sent by a holder after its deadline", len(late)),
        *found,
    ]


def _stopped(child: int) -> bool:
    """Wait until a child stops itself or ends; return whether it stopped."""
    _, status = os.waitpid(child, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def _hold(bed: Testbed, at: int) -> None:
    steps = Steps(0, lambda: os.kill(os.getpid(), signal.SIGSTOP)).installed()
    with bed.gate(executor=Timed(bed)) as gate:
        (bed.folder / "deadline").write_text(str(bed.clock() + DEADLINE_MS))
        steps.arm(at)
        decide(gate, bed, 0, deadline_ms=DEADLINE_MS)


def _take_over(bed: Testbed) -> None:
    """Decide the same event. Nothing can be decided where the holder was stopped while it held the write lock."""
    with suppress(StoreError), bed.gate(executor=Timed(bed)) as gate:
        gate.recover()
        decide(gate, bed, 0)


def _entered(bed: Testbed) -> list[tuple[int, int]]:
    path = bed.folder / "entered"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

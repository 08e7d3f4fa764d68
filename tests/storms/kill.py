"""`kill -9`, at any moment, of three processes that decide on one record, also while they recover."""

from __future__ import annotations

import os
import time
from random import Random

from tests.attack.figures import Figure, measured, none
from tests.attack.forks import fork, in_child, kill
from tests.attack.kills import SlowBank
from tests.attack.testbed import Testbed, contract

from .ground import Ground, acknowledged_in, bed_of, decide, faults, reckon, wait_for_an_answer

WHAT = "3 processes decide on one record and are killed at random"
PROCESSES = 3
LEASE_MS = 2_000
LIFE_S_MAX = 0.06
RECOVERS_FIRST = 0.3
FOREIGN = 0.1  # share of the other processes' events that are sent, too
PATIENCE = 0.7
LOOKS = 10  # kills between two verifications of the record


def storm(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    killed, wrong = _in_the_storm(bed, ground)
    return [
        measured("processes killed", killed),
        none("faults of the record meanwhile", wrong),
        *reckon(bed, range(ground.n)),
    ]


def _in_the_storm(bed: Testbed, ground: Ground) -> tuple[int, int]:
    """Kill processes and start others until all have ended by themselves; return the numbers of kills and faults."""
    rng, killed, wrong = ground.rng, 0, 0
    alive = {part: _begin(bed, part, ground) for part in range(PROCESSES)}
    while alive:
        if rng.random() < PATIENCE:  # else on a busy machine no decision would end
            wait_for_an_answer(bed)
        time.sleep(rng.random() * LIFE_S_MAX)
        part = rng.choice(sorted(alive))
        ended, status = os.waitpid(alive[part], os.WNOHANG)
        if ended:
            del alive[part]
            wrong += status != 0
            continue
        kill(alive[part])
        killed += 1
        alive[part] = _begin(bed, part, ground)
        if killed % LOOKS == 0:
            wrong += in_child(lambda: _faults(bed))
    return killed, wrong


def _begin(bed: Testbed, part: int, ground: Ground) -> int:
    own = Random(ground.rng.random())
    return fork(lambda: _work(bed, part, ground.n, own))


def _work(bed: Testbed, part: int, n: int, rng: Random) -> None:
    """Decide one share of the events, and some of the others', and send those again that were not answered."""
    ended = acknowledged_in(bed).ended()
    left = [
        number for number in range(n) if number not in ended and (number % PROCESSES == part or rng.random() < FOREIGN)
    ]
    rng.shuffle(left)
    with bed.gate(executor=SlowBank(bed, rng)) as gate:
        if rng.random() < RECOVERS_FIRST:
            gate.recover()
        while left:
            answer = decide(gate, bed, left[-1])
            number = left.pop()
            if answer is None or answer.retryable:
                left.insert(0, number)


def _faults(bed: Testbed) -> int:
    with bed.gate() as gate:
        return faults(gate, bed)

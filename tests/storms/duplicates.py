"""Send one event many times from four processes, half with another body: it is executed once, and the others are refused."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sds import Gate
from sds.kernel.errors import SdsError
from tests.attack.figures import Figure, every, none
from tests.attack.forks import fork, in_child, in_children
from tests.attack.outside import Bank
from tests.attack.testbed import Testbed, contract

from .ground import IN_PROGRESS, Ground, bed_of, decide, reckon

WHAT = "one event is sent many times at once by 4 processes, half of them with another body"
PROCESSES, CALLERS = 4, 8
CONFLICT = "EVENT_CONFLICT"
BANK_S = 0.3  # the first order is still being executed when the others come
OTHER = "please pay 9999"


def storm(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, contract())
    bed.open_accounts([0])
    in_child(lambda: bed.gate().close())
    first = fork(partial(_first, bed))
    while not in_child(partial(_is_claimed, bed)):
        time.sleep(0.01)
    shares = [range(part, ground.n, PROCESSES) for part in range(PROCESSES)]
    said = in_children([partial(_send_all, bed, list(share)) for share in shares], PROCESSES)
    os.waitpid(first, 0)
    answers = [each for part in said for each in part]
    changed, same = ([said for other, said in answers if other is wanted] for wanted in (True, False))
    return [
        every("the changed refused as EVENT_CONFLICT", changed.count(CONFLICT), len(changed)),
        every(
            "the same answered alike, or still running",
            sum(said in ("SUCCESS", IN_PROGRESS) for said in same),
            len(same),
        ),
        every("executions", len(bed.bank.paid()), 1),
        none("executions of another amount", sum(amount != 1_000 for *_, amount in bed.bank.paid())),
        *reckon(bed, [0]),
    ]


def _first(bed: Testbed) -> None:
    with bed.gate(executor=Bank(bed.folder / "bank.db", bed.clock, takes_s=BANK_S)) as gate:
        decide(gate, bed, 0)


def _is_claimed(bed: Testbed) -> bool:
    with bed.gate() as gate:
        return gate.store.value("SELECT 1 FROM events") is not None


def _send_all(bed: Testbed, numbers: list[int]) -> list[tuple[bool, str]]:
    with bed.gate() as gate, ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(partial(_send, gate, bed), numbers))


def _send(gate: Gate, bed: Testbed, number: int) -> tuple[bool, str]:
    """Send the event; return whether it had the other body, and the answer in one word."""
    other = number // PROCESSES % 2 == 1
    try:
        answer = gate.decide(bed.event(0, text=OTHER) if other else bed.event(0))
    except SdsError as error:
        return other, error.reason_code
    return other, answer.execution or answer.tag or answer.state

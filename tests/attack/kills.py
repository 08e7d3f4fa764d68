"""`kill -9`, at random moments, of processes that decide, recover and pay side by side."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from random import Random

from sds.kernel.errors import SdsError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.scale import scale

from .figures import Figure, every, measured, none
from .forks import fork, in_child, kill
from .outside import Bank
from .testbed import Testbed, contract, fates, faults, settle

WORKERS = 2
LIFE_S_MAX = 0.06
EVENTS_AT_ONCE = 12
LEASE_MS = 400
RECOVERIES = 0.1
LOOKS = 20  # verifications of the record while the workers go on


class SlowBank(Bank):
    """A bank that takes up to 4 ms before and after it pays: long enough to be killed meanwhile."""

    def __init__(self, bed: Testbed, rng: Random) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock)
        self._rng = rng

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        time.sleep(self._rng.random() * 0.004)
        receipt = super().dispatch(intent, key, deadline_s)
        time.sleep(self._rng.random() * 0.004)
        return receipt


def attack(folder: Path, rng: Random) -> list[Figure]:
    kills = scale(200, 10_000)
    bed = Testbed(folder, terms=contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2))
    bed.open_accounts(range(kills))
    in_child(lambda: bed.gate().close())
    wrong, workers = 0, [_begin(bed, 0, rng) for _ in range(WORKERS)]
    for number in range(kills):
        time.sleep(rng.random() * LIFE_S_MAX / WORKERS)
        kill(workers.pop(0))
        workers.append(_begin(bed, number, rng))
        if number % max(1, kills // LOOKS) == 0:
            wrong += in_child(lambda: _faults(bed))
    for worker in workers:
        kill(worker)
    return [measured("processes killed", kills + WORKERS), none("faults of the record meanwhile", wrong), *_end(bed)]


def _begin(bed: Testbed, first: int, rng: Random) -> int:
    """Start a worker that decides random events around number `first`, and recovers now and then."""
    own = Random(rng.random())
    return fork(lambda: _work(bed, first, own))


def _work(bed: Testbed, first: int, rng: Random) -> None:
    with bed.gate(executor=SlowBank(bed, rng)) as gate:
        while True:
            try:
                if rng.random() < RECOVERIES:
                    gate.recover()
                else:
                    gate.decide(bed.event(max(0, first - EVENTS_AT_ONCE // 2) + rng.randrange(EVENTS_AT_ONCE)))
            except SdsError as error:
                if error.reason_code != "FLOW_IN_PROGRESS":
                    raise


def _faults(bed: Testbed) -> int:
    with bed.gate() as gate:
        return faults(gate)


def _end(bed: Testbed) -> list[Figure]:
    bed.clock.ahead_ms += 10 * LEASE_MS
    return in_child(lambda: _settled(bed))


def _settled(bed: Testbed) -> list[Figure]:
    with bed.gate() as gate:
        errors = len(gate.recover().errors)
        events = [int(row[0][1:]) for row in gate.store.rows("SELECT event_id FROM events")]
        for number in events:
            settle(gate, bed.event(number))
        counts: Counter[str] = fates(gate)
        interrupted = gate.store.value("SELECT count(*) FROM decision_flows WHERE tag = 'INTERRUPTED'")
        resolved = gate.store.value("SELECT count(*) FROM ledger WHERE kind = 'RESOLVED'")
        voided = gate.store.value("SELECT count(*) FROM ledger WHERE kind = 'VOIDING'")
        return [
            measured("flows interrupted", interrupted),
            measured("orders voided", voided),
            measured("orders resolved late", resolved),
            measured("events for a human", counts["human"]),
            every("events decided, or a human's", counts["decided"] + counts["human"], len(events)),
            none("errors of recovery", errors),
            none("paid twice", bed.paid_twice()),
            none("keys of which bank and record say otherwise", bed.disagreements(gate)),
            none("faults of the record", faults(gate)),
        ]

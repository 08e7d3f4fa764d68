"""Executors that lie, hang, raise, decline, or are down for a while.

The kernel itself causes no second payment; every hang is bounded; where record and bank differ there is a case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from sds import Gate
from sds.kernel.errors import SdsError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.scale import scale

from .figures import Figure, measured, none
from .forks import in_children
from .hostile import Answering, Declining, Hanging, Raising
from .outside import Bank
from .testbed import Testbed, contract, fates, faults, settle

DISPATCH_MS = 200
BROKEN = ("paid twice", "untold", "no case", "not decided", "slow", "faults")
_NONE = ("", "", 0)
ANYTHING = 12  # events for an executor that misbehaves in another way each time
DECIDED_IN_S = 10.0  # a hang is 0.4 s, twice the dispatch limit; five tries, on a busy machine
HOUR_MS = 3_600_000

Make = Callable[[Bank], object]


class Lying:
    """A bank that misreports. `pays_minor`: None pays nothing, 0 the ordered amount; `admits`: its look-ups are true."""

    idempotent = True

    def __init__(self, bank: Bank, *, says: str, pays_minor: int | None, admits: bool) -> None:
        self._bank, self._says, self._pays_minor, self._admits = bank, says, pays_minor, admits

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if self._pays_minor is not None:
            self._bank.pay(intent, key, self._pays_minor or dict(intent.params)["amount"])
        return Receipt(self._says, "PAY-0")  # type: ignore[arg-type]  # settled or rejected

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._bank.lookup(key, deadline_s) if self._admits else Receipt(self._says, "PAY-0")  # type: ignore[arg-type]


class DownForAWhile:
    """A bank that raises for its first calls, and does nothing then."""

    idempotent = True

    def __init__(self, bank: Bank, calls: int) -> None:
        self._bank, self._left = bank, calls

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._closed()
        return self._bank.dispatch(intent, key, deadline_s)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        self._closed()
        return self._bank.lookup(key, deadline_s)

    def _closed(self) -> None:
        self._left -= 1
        if self._left >= 0:
            raise ConnectionRefusedError("the bank is closed")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of executor. `lies`: only its statement is true; `anything`: it misbehaves in another way each time."""

    make: Make
    lies: bool = False
    idempotent: bool = True
    anything: bool = False


KINDS: Mapping[str, Kind] = {
    "says rejected, has paid, admits it": Kind(partial(Lying, says="rejected", pays_minor=0, admits=True)),
    "says rejected, has paid": Kind(partial(Lying, says="rejected", pays_minor=0, admits=False), lies=True),
    "says settled, did nothing": Kind(partial(Lying, says="settled", pays_minor=None, admits=False), lies=True),
    "pays another amount": Kind(partial(Lying, says="settled", pays_minor=7, admits=True), lies=True),
    "raises after paying": Kind(partial(Raising, pays=True), anything=True),
    "raises after paying, blind": Kind(partial(Raising, pays=True, blind=True), anything=True),
    "raises before": Kind(partial(Raising, pays=False), anything=True),
    "raises after paying, not idempotent": Kind(partial(Raising, pays=True), anything=True, idempotent=False),
    "raises before, not idempotent": Kind(partial(Raising, pays=False), anything=True, idempotent=False),
    "hangs after paying": Kind(Hanging),
    "hangs, blind": Kind(partial(Hanging, blind=True)),
    "hangs, does nothing": Kind(partial(Hanging, pays=False)),
    "answers anything, has paid": Kind(Answering, anything=True),
    "answers anything, did nothing": Kind(partial(Answering, pays=False), anything=True, lies=True),
    "declines for ever": Kind(partial(Declining, times=10_000)),
    "declines at first": Kind(partial(Declining, times=2)),
    "down for a while": Kind(partial(DownForAWhile, calls=12)),
}


def attack(folder: Path, rng: Random) -> list[Figure]:
    each = scale(2, 24)
    total = dict.fromkeys(
        ("events", "differences", "paid twice", "untold", "no case", "not decided", "slow", "faults"), 0
    )
    works = [
        partial(_one, folder / str(n), kind, ANYTHING if kind.anything else each, Random(rng.random()))
        for n, kind in enumerate(KINDS.values())
    ]
    for name, found in zip(KINDS, in_children(works), strict=True):
        broken = {what: found[what] for what in BROKEN if found[what]}
        if broken:
            print(f"  {name}: {broken}")
        total = {what: count + found[what] for what, count in total.items()}
    return [
        measured(f"events with {len(KINDS)} kinds of executors", total["events"]),
        measured("differences by the bank's statement", total["differences"]),
        none("paid twice by the kernel's own doing", total["paid twice"]),
        none("differences nobody is told of before, of banks that admit them", total["untold"]),
        none("differences that are no case, of any bank, once compared", total["no case"]),
        none("neither decided nor a human's, once all is well", total["not decided"]),
        none(f"that took longer than {DECIDED_IN_S:.0f} s", total["slow"]),
        none("faults of the record", total["faults"]),
    ]


def _one(folder: Path, kind: Kind, each: int, rng: Random) -> dict[str, int]:
    bed = Testbed(folder, terms=contract(ttl_ms=2_000, dispatch_ms=DISPATCH_MS), idempotent=kind.idempotent, lists=True)
    bed.open_accounts(range(each))
    bad = kind.make(bed.bank)
    with bed.gate(executor=bad) as gate:  # type: ignore[arg-type]  # that is what is attacked
        slow = sum(_takes_s(gate, bed, number) > DECIDED_IN_S for number in rng.sample(range(each), each))
        if rng.random() < 0.5:
            gate.recover()
    bed.clock.ahead_ms += HOUR_MS
    with bed.gate(executor=bad if kind.lies else bed.bank) as gate:  # type: ignore[arg-type]
        for _ in range(2):
            gate.recover()
            for number in range(each):
                settle(gate, bed.event(number))
        found = fates(gate)
    with bed.gate() as gate:
        untold, differences = _untold(bed, gate), len(gate.reconcile().differences)
        return {
            "events": each,
            "slow": slow,
            "paid twice": 0 if kind.lies else bed.paid_twice(),
            "differences": differences,
            "untold": 0 if kind.lies else untold,
            "no case": _untold(bed, gate),
            "not decided": each - found["decided"] - found["human"],
            "faults": faults(gate),
        }


def _takes_s(gate: Gate, bed: Testbed, number: int) -> float:
    began = time.monotonic()
    try:
        gate.decide(bed.event(number))
    except SdsError as error:
        print(f"  {error}")
    return time.monotonic() - began


def _untold(bed: Testbed, gate: Gate) -> int:
    """Count the keys on which the bank's file and the record differ, and which are no case for a human."""
    sql = "SELECT e.idempotency_key, e.dfid, e.status, e.params ->> '$.amount' FROM execution_log e"
    record = {key: (dfid, status, amount) for key, dfid, status, amount in gate.store.rows(sql)}
    paid = {key: amount for key, _, amount in bed.bank.paid()}
    odd = {
        key
        for key in record.keys() | paid.keys()
        if (record.get(key, _NONE)[1] == "SUCCESS") != (key in paid) or paid.get(key, 0) not in (0, record[key][2])
    }
    cases = gate.escalations()
    asked = {case.dfid for case in cases} | {
        case.trigger["statement"]["key"] for case in cases if "statement" in case.trigger
    }
    return sum(key not in asked and record.get(key, _NONE)[0] not in asked for key in odd)

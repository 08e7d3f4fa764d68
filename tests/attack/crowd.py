"""Send many claims on one account at once, from threads and processes: all that fit the balance are paid, and no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from sds.kernel.errors import SdsError
from tests.scale import scale

from .figures import Figure, added, every, none
from .forks import in_child, in_children
from .outside import Bank
from .testbed import Testbed, contract, faults, settle

CLAIMS = 64
BALANCE_MINOR = 41_000  # enough for some forty claims
BANK_S = 0.005


def attack(folder: Path, rng: Random) -> list[Figure]:
    return [
        figure
        for processes in (1, 2)
        for figure in added([_round(folder / f"{n}-{processes}", processes, rng) for n in range(scale(1, 5))])
    ]


def _round(folder: Path, processes: int, rng: Random) -> list[Figure]:
    bed = Testbed(folder, terms=contract(ttl_ms=60_000))
    bed.accounts.put("A", BALANCE_MINOR)
    in_child(lambda: bed.gate().close())
    claims = rng.sample(range(CLAIMS), CLAIMS)
    undecided = sum(in_children([partial(_send, bed, claims[n::processes]) for n in range(processes)]))
    paid = [amount for _, _, amount in bed.bank.paid()]
    left = BALANCE_MINOR - sum(paid)
    unpaid = sorted({1_000 + number for number in claims} - set(paid))
    fit = len(paid) + (bool(unpaid) and left >= unpaid[0])
    name = f"claims of {CLAIMS} at once on one account, {processes} process{'es' if processes > 1 else ''}"
    return [
        every(f"paid of those that fit, {name}", len(paid), fit),
        none(f"paid beyond the balance, {processes}", max(0, -left)),
        none(f"paid twice, {processes}", bed.paid_twice()),
        none(f"not decided, {processes}", undecided),
        none(f"faults of the record, {processes}", in_child(partial(_faults, bed))),
    ]


def _send(bed: Testbed, claims: list[int]) -> int:
    """Send all claims at once, each in its own thread; return how many were not decided."""
    bank = Bank(bed.folder / "bank.db", bed.clock, takes_s=BANK_S)
    with bed.gate(executor=bank) as gate, ThreadPoolExecutor(len(claims)) as pool:

        def one(number: int) -> bool:
            try:
                return settle(gate, bed.event(number, account="A")).state == "CLOSED"
            except SdsError as error:
                print(f"  {error}")
                return False

        return list(pool.map(one, claims)).count(False)


def _faults(bed: Testbed) -> int:
    with bed.gate() as gate:
        return faults(gate)

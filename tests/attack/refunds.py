"""Restore the refund gate's record from a backup, also from one made during a decision, and send all claims again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random

from sds import Gate
from sds.gates.refund.gate import airline_path, ensure_world, load_refund_contract, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.source import TicketSource
from tests.gates.refund.rail.payouts import payouts
from tests.proposers import Greedy
from tests.scale import scale

from .figures import Figure, measured, none
from .forks import in_children
from .restores import COPIES, Backup
from .testbed import Clock, fates, faults, settle

CLAIMS = 12
MOMENTS = ("reasoning", "between")
LEASE_MS = 60_000


def attack(folder: Path, rng: Random) -> list[Figure]:
    ensure_world(folder, claims=20 * CLAIMS)
    by_ticket = {claim.event["ticket_id"]: claim.event for claim in read_queue(folder)}
    events = list(by_ticket.values())
    backups = scale(4, 20)
    works = [partial(_one, folder, n, rng.sample(events, CLAIMS), Random(rng.random())) for n in range(backups)]
    found = in_children(works)
    twice, paid, lost, apart, wrong = (sum(column) for column in zip(*found, strict=True))
    return [
        measured("backups put back", backups),
        measured("payments", paid),
        none("paid twice", twice),
        none("claims neither decided nor a human's", lost),
        none("differences between rail and record", apart),
        none("faults of the record", wrong),
    ]


@contextmanager
def _opened(folder: Path, own: Path, rail: RailProcess, clock: Clock, backup: Backup | None = None) -> Iterator[Gate]:
    with closing(TicketSource(airline_path(folder))) as source:
        executor = rail.executor(source.version)
        watch = (lambda _packet, _data: backup.at("reasoning")) if backup else None
        terms = load_refund_contract()
        with Gate(terms, source, executor, folder=own, engine=Greedy(), on_reasoned=watch, now_ms=clock) as gate:
            yield gate


def _one(folder: Path, number: int, claims: list[dict[str, str]], rng: Random) -> tuple[int, ...]:
    """Restore one backup; return the numbers of second payments, payments, lost claims, differences and faults."""
    own, clock = folder / f"gate{number}", Clock()
    how, moment = COPIES[number % len(COPIES)], MOMENTS[number // len(COPIES) % len(MOMENTS)]
    backup = Backup(own, folder / f"copy{number}", how, moment)
    with RailProcess(folder / f"rail{number}.db") as rail:
        with _opened(folder, own, rail, clock, backup) as gate:
            at = rng.randrange(CLAIMS - 2)
            for position, event in enumerate(claims[:-2]):
                backup.armed |= position == at
                backup.at("between")
                settle(gate, event)
        backup.at(moment)
        backup.put_back()
        clock.ahead_ms += LEASE_MS
        with _opened(folder, own, rail, clock) as gate:
            gate.adopt(who="ada", reason="put back from a backup")  # without this nothing is ordered: the rail lists
            for event in rng.sample(claims, CLAIMS):
                settle(gate, event)
            gate.recover()
            found, paid = fates(gate), payouts(rail)
            lost = CLAIMS - found["decided"] - found["human"]
            twice = paid["tickets_paid_twice_in_kind"] + paid["dfids_paid_twice"]
            return twice, paid["settled"], lost, len(gate.reconcile().differences), faults(gate)

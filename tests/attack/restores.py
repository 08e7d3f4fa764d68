"""Restore a record that was copied at a random point, also during a decision or a payment, or was lost completely.

Then every event is sent again, with new ones. A bank that honours keys pays nothing twice. Nor does a bank that lists its
orders and honours no keys, even where the new decisions differ from the old ones and flows were restarted: nothing is
ordered until the unknown orders are adopted.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

from sds import Gate
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.scale import scale

from .figures import Figure, measured, none
from .forks import in_children
from .outside import Bank
from .testbed import Teller, Testbed, fates, faults, settle

BEFORE, AFTER = 10, 4  # events sent before the restore, and new ones after it
MOMENTS = ("between", "reasoning", "before paying", "after paying")
LEASE_MS = 60_000

Copy = Callable[[Path, Path], None]


def bare(own: Path, copy: Path) -> None:
    """Copy the record with `VACUUM INTO`, and the key."""
    with closing(sqlite3.connect(own / "decisions.db")) as db:
        db.execute("VACUUM INTO ?", (str(copy / "decisions.db"),))
    shutil.copy(own / "kernel.key", copy)


def online(own: Path, copy: Path) -> None:
    """Copy the record with SQLite's online backup, and the key."""
    with closing(sqlite3.connect(own / "decisions.db")) as db, closing(sqlite3.connect(copy / "decisions.db")) as made:
        db.backup(made)
    shutil.copy(own / "kernel.key", copy)


def whole(own: Path, copy: Path) -> None:
    """Copy the folder's files, the write-ahead log included."""
    shutil.copytree(own, copy, dirs_exist_ok=True)


def lost(own: Path, copy: Path) -> None:
    """Copy nothing: the restored folder is empty."""


COPIES: tuple[Copy, ...] = (bare, online, whole, lost)


class Backup:
    """Makes one copy, at the first `moment` after it is armed. `how`: one of COPIES."""

    def __init__(self, own: Path, copy: Path, how: Copy, moment: str) -> None:
        copy.mkdir()
        self._own, self._copy, self._how, self._moment = own, copy, how, moment
        self.armed = False

    def at(self, moment: str) -> None:
        if self.armed and moment == self._moment:
            self.armed = False
            self._how(self._own, self._copy)

    def put_back(self) -> None:
        shutil.rmtree(self._own)
        shutil.copytree(self._copy, self._own)


class Fickle(Teller):
    """A teller that gets no turn now and then, and asks for `more_minor` more, so as to decide otherwise later."""

    def __init__(self, rng: Random, more_minor: int) -> None:
        self._rng, self._more_minor = rng, more_minor

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if self._rng.random() < 0.3:
            raise QueueTimeoutError("there is no turn")
        return super().propose(packet, tokens_max=tokens_max)

    def amount_minor(self, packet: DecisionPacket) -> int:
        return super().amount_minor(packet) + self._more_minor


class WatchedBank(Bank):
    """A bank that lets a backup be made before and after it pays."""

    def __init__(self, bed: Testbed, backup: Backup) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock, idempotent=bed.bank.idempotent)
        self._backup = backup

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._backup.at("before paying")
        receipt = super().dispatch(intent, key, deadline_s)
        self._backup.at("after paying")
        return receipt


def attack(folder: Path, rng: Random) -> list[Figure]:
    backups = scale(16, 100)  # in CI each kind of copy at each moment once
    return [
        *_restored(folder / "keys", backups, rng, "by a bank that honours keys", lists=False),
        *_restored(folder / "lists", backups, rng, "by a bank that only lists", lists=True),
    ]


def _restored(folder: Path, backups: int, rng: Random, who: str, *, lists: bool) -> list[Figure]:
    works = [partial(_one, folder / str(n), n, Random(rng.random()), lists=lists) for n in range(backups)]
    twice, undecided, disagreements, wrong = (sum(column) for column in zip(*in_children(works), strict=True))
    return [
        measured(f"backups put back, paid {who}", backups),
        none(f"paid twice {who}", twice),
        none(f"events not decided, paid {who}", undecided),
        none(f"differences between bank and record, paid {who}", disagreements),
        none(f"faults of the record, paid {who}", wrong),
    ]


def _one(folder: Path, number: int, rng: Random, *, lists: bool) -> tuple[int, int, int, int]:
    """Restore one backup; return the numbers of second payments, undecided events, differences and faults."""
    how, moment = COPIES[number % len(COPIES)], MOMENTS[number // len(COPIES) % len(MOMENTS)]
    bed = Testbed(folder, lists=lists, idempotent=not lists)
    bed.open_accounts(range(BEFORE + AFTER))
    backup = Backup(bed.own, folder / "copy", how, moment)
    _decide_all(bed, backup, Fickle(rng, 0) if lists else Teller(), at=rng.randrange(BEFORE))
    backup.put_back()
    bed.clock.ahead_ms += LEASE_MS
    with bed.gate(engine=Fickle(rng, 7_000) if lists else None) as gate:
        if lists:
            _take_over(gate, bed, rng)
        _send_again(gate, bed, rng)
        undecided = BEFORE + AFTER - fates(gate)["decided"]
        twice = bed.accounts_paid_twice()
        if twice or undecided:
            print(f"  after `{how.__name__}` {moment}: {twice} paid twice, {undecided} not decided")
        apart = len(gate.reconcile().differences) if lists else bed.disagreements(gate)
        return twice, undecided, apart, faults(gate)


def _decide_all(bed: Testbed, backup: Backup, engine: Teller, *, at: int) -> None:
    """Decide the first events in order; the backup is made during number `at`."""
    bank = WatchedBank(bed, backup)
    with bed.gate(engine=engine, executor=bank, on_reasoned=lambda _packet, _data: backup.at("reasoning")) as gate:
        for number in range(BEFORE):
            backup.armed |= number == at
            backup.at("between")
            assert "SUCCESS" == settle(gate, bed.event(number)).execution


def _take_over(gate: Gate, bed: Testbed, rng: Random) -> None:
    """Check that a record that knows less than the bank orders nothing, however often events are sent; then adopt the unknown
    orders.
    """
    paid = len(bed.bank.paid())
    if gate.reconcile().differences:
        for number in rng.choices(range(BEFORE), k=2 * BEFORE):
            gate.decide(bed.event(number))
    answer = gate.decide(bed.event(BEFORE))
    behind = bool(gate.reconcile().differences)
    assert behind == (answer.tag == "RECORD_BEHIND") or answer.tag == "NOT_DECIDED"
    assert not behind or paid == len(bed.bank.paid())
    gate.adopt(who="ada", reason="put back from a backup")


def _send_again(gate: Gate, bed: Testbed, rng: Random) -> None:
    assert () == gate.recover().errors  # only recovery learns the end of an order that was in flight in the backup
    for number in rng.sample(range(BEFORE + AFTER), BEFORE + AFTER):
        settle(gate, bed.event(number))
    gate.recover()
    for number in range(BEFORE + AFTER):
        settle(gate, bed.event(number))

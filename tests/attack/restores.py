"""A record put back: copied at a random point, also in the middle of a decision or of a payment, or lost as a whole.

Then every event is sent again, and new ones: an honest bank that honours keys pays nothing twice.
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
from sds.kernel.executor import ExecutionIntent, Receipt
from tests.scale import scale

from .figures import Figure, none, told
from .forks import in_children
from .outside import Bank
from .testbed import Testbed, fates, faults, settle

BEFORE, AFTER = 10, 4  # events sent before it is put back, and fresh ones after
MOMENTS = ("between", "reasoning", "before paying", "after paying")
LEASE_MS = 60_000

Copy = Callable[[Path, Path], None]


def bare(own: Path, copy: Path) -> None:
    """Copy what `VACUUM INTO` makes of the record, and the key."""
    with closing(sqlite3.connect(own / "decisions.db")) as db:
        db.execute("VACUUM INTO ?", (str(copy / "decisions.db"),))
    shutil.copy(own / "kernel.key", copy)


def online(own: Path, copy: Path) -> None:
    """Copy with SQLite's backup interface, while the gate goes on."""
    with closing(sqlite3.connect(own / "decisions.db")) as db, closing(sqlite3.connect(copy / "decisions.db")) as made:
        db.backup(made)
    shutil.copy(own / "kernel.key", copy)


def whole(own: Path, copy: Path) -> None:
    """Copy the folder as it is, write-ahead log included."""
    shutil.copytree(own, copy, dirs_exist_ok=True)


def lost(own: Path, copy: Path) -> None:
    """Keep nothing: what is put back is an empty folder."""


COPIES: tuple[Copy, ...] = (bare, online, whole, lost)


class Backup:
    """Makes one copy at the first moment of its kind once it is armed."""

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


class WatchedBank(Bank):
    """Lets a backup be made before and after it pays."""

    def __init__(self, path: Path, backup: Backup) -> None:
        super().__init__(path)
        self._backup = backup

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._backup.at("before paying")
        receipt = super().dispatch(intent, key, deadline_s)
        self._backup.at("after paying")
        return receipt


def attack(folder: Path, rng: Random) -> list[Figure]:
    backups = scale(24, 100)
    found = in_children([partial(_one, folder / str(n), n, Random(rng.random())) for n in range(backups)])
    twice, undecided, disagreements, wrong = (sum(column) for column in zip(*found, strict=True))
    return [
        told("backups put back", backups),
        none("paid twice", twice),
        none("events not decided", undecided),
        none("keys of which bank and record say otherwise", disagreements),
        none("faults of the record", wrong),
    ]


def _one(folder: Path, number: int, rng: Random) -> tuple[int, int, int, int]:
    """Put one backup back; return what was paid twice, what is not decided, disagreements and faults."""
    how, moment = COPIES[number % len(COPIES)], MOMENTS[number // len(COPIES) % len(MOMENTS)]
    bed = Testbed(folder)
    bed.open_accounts(range(BEFORE + AFTER))
    backup = Backup(bed.own, folder / "copy", how, moment)
    _decide_all(bed, backup, at=rng.randrange(BEFORE))
    backup.put_back()
    bed.clock.ahead_ms += LEASE_MS
    order = list(range(BEFORE + AFTER))
    rng.shuffle(order)
    with bed.gate() as gate:
        _recover(gate, rng)
        for event in order:
            settle(gate, bed.event(event))
        _recover(gate, rng)
        found = fates(gate)
        twice = bed.paid_twice()
        if twice:
            print(f"  paid twice after `{how.__name__}` {moment}: {twice}")
        undecided = len(order) - found["decided"]
        return twice, undecided, bed.disagreements(gate), faults(gate)


def _decide_all(bed: Testbed, backup: Backup, *, at: int) -> None:
    """Decide the first events one after the other; the backup is made at the `at`-th."""
    bank = WatchedBank(bed.folder / "bank.db", backup)
    with bed.gate(executor=bank, on_reasoned=lambda _packet, _data: backup.at("reasoning")) as gate:
        for number in range(BEFORE):
            backup.armed |= number == at
            backup.at("between")
            assert "SUCCESS" == settle(gate, bed.event(number)).execution


def _recover(gate: Gate, rng: Random) -> None:
    if rng.random() < 0.7:
        assert () == gate.recover().errors

"""What storms share: folder, size, store and random generator; the log of acknowledged answers; and the final reckoning.

The engine is the `Teller` of tests.attack.testbed, a script that pays what the event asks for: a storm tests the kernel, not
a model. The executor is the bank of tests.attack.outside, a file that every process opens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random

from sds import Gate
from sds.host import paths
from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import SdsError
from sds.kernel.flow.states import Answer
from tests.attack.figures import Figure, every, measured, none
from tests.attack.forks import in_child
from tests.attack.testbed import Testbed, fates, settle

from .servers import Server

SQLITE, POSTGRESQL = STORES = ("sqlite", "postgresql")
CALM_MS = 120_000  # longer than any lease in a storm
ACKNOWLEDGED, PATIENCE_S = "acknowledged.jsonl", 1.0
IN_PROGRESS = "FLOW_IN_PROGRESS"


@dataclass(frozen=True)
class Ground:
    """The conditions of a storm. `n`: its size; `server`: the PostgreSQL that holds the records, if `store` is that."""

    folder: Path
    n: int
    store: str
    rng: Random
    server: Server | None = None


def warm(folder: Path) -> None:
    """Decide and recover once in this process, so that its forked children have everything loaded and compiled."""
    bed = Bed(folder / "warm")
    bed.open_accounts([0])
    with bed.gate() as gate:
        settle(gate, bed.event(0))
    _reckoned(bed, [0])


class Bed(Testbed):
    """A testbed whose gate's folder has a unique name, which is also the name of its schema in PostgreSQL."""

    @property
    def own(self) -> Path:
        return self.folder / f"bed_{sha256(str(self.folder).encode()).hexdigest()[:12]}"


def bed_of(ground: Ground, terms: Contract, name: str = "bed") -> Bed:
    """Return a storm's testbed in a new folder."""
    return Bed(ground.folder / name, terms=terms)


class Acknowledged:
    """The log of what callers were answered. Each process appends a line at once after an answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, number: int, answer: Answer) -> None:
        said = {"number": number, "dfid": answer.dfid, "state": answer.state, "execution": answer.execution}
        line = json.dumps({**said, "waits": answer.retryable or answer.pending}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def read(self) -> Iterator[dict[str, object]]:
        """Yield the answers. A half line of a killed process is skipped."""
        text = self._path.read_text() if self._path.exists() else ""
        for line in text.splitlines():
            with suppress(ValueError):
                yield json.loads(line)

    def ended(self) -> set[object]:
        """Return the numbers of the events that need not be sent again."""
        return {each["number"] for each in self.read() if not each["waits"]}


def acknowledged_in(bed: Testbed) -> Acknowledged:
    return Acknowledged(bed.folder / ACKNOWLEDGED)


def wait_for_an_answer(bed: Testbed) -> None:
    """Wait until one more caller was answered, PATIENCE_S at most: else on a busy machine no decision would end."""
    log, until = bed.folder / ACKNOWLEDGED, time.monotonic() + PATIENCE_S
    before = log.stat().st_size if log.exists() else 0
    while time.monotonic() < until and (log.stat().st_size if log.exists() else 0) == before:
        time.sleep(0.002)


def decide(gate: Gate, bed: Testbed, number: int, *, deadline_ms: int | None = None) -> Answer | None:
    """Decide an event and log its answer; return None for an expected error. Raises EVENT_CONFLICT and INTERNAL."""
    try:
        answer = gate.decide(bed.event(number), deadline_ms=deadline_ms)
    except SdsError as error:
        if error.reason_code in ("EVENT_CONFLICT", "INTERNAL"):
            raise
        return None
    acknowledged_in(bed).write(number, answer)
    return answer


def reckon(bed: Testbed, numbers: Iterable[int]) -> list[Figure]:
    """End all leases, recover, and send all events again; return the figures that must hold."""
    bed.clock.ahead_ms += CALM_MS
    return in_child(lambda: _reckoned(bed, list(numbers)))


def _reckoned(bed: Testbed, numbers: list[int]) -> list[Figure]:
    with bed.gate() as gate:
        errors = list(gate.recover().errors)
        for number in numbers:
            settle(gate, bed.event(number))
        errors += gate.recover().errors
        for error in errors:
            print(f"  recovery: {error}")
        counts = fates(gate)
        ends = counts["decided"] + counts["human"] + counts["waits"]
        for tag, count in gate.store.rows(
            "SELECT tag, count(*) FROM decision_flows WHERE state = 'ESCALATED' GROUP BY tag"
        ):
            print(f"  a human's: {count} as {tag}")
        lost = [each for each in acknowledged_in(bed).read() if _is_lost(gate, each)]
        for each in lost:
            print(f"  lost: {each}")
        return [
            measured("flows interrupted", _count(gate, "decision_flows WHERE tag = 'INTERRUPTED'")),
            measured("orders resolved late", _count(gate, "ledger WHERE kind = 'RESOLVED'")),
            measured("events for a human", counts["human"]),
            every("events at their end: decided, waiting visibly, or a human's", ends, len(numbers)),
            none("paid twice", bed.paid_twice()),
            none("acknowledged and lost", len(lost)),
            none("keys of which bank and record say otherwise", bed.disagreements(gate)),
            none("errors of recovery", len(errors)),
            none("faults of the record", faults(gate, bed)),
        ]


def _count(gate: Gate, what: str) -> int:
    return int(gate.store.value(f"SELECT count(*) FROM {what}"))


def _is_lost(gate: Gate, said: dict[str, object]) -> bool:
    """Tell whether the record lacks an answer that a caller was given."""
    row = gate.store.row(
        "SELECT f.state, e.status FROM decision_flows f LEFT JOIN execution_log e ON e.dfid = f.dfid WHERE f.dfid = ?",
        (said["dfid"],),
    )
    if row is None:
        return True
    state, status = row
    if said["state"] == "CLOSED":
        return (state, status) != ("CLOSED", said["execution"])
    return said["state"] == "ESCALATED" and state == "ACTIVE"


def faults(gate: Gate, bed: Testbed) -> int:
    """Print the record's faults, signatures included; return their number."""
    found = verify.verify(gate.store, None, paths.public_keys_of(bed.own)).faults
    for fault in found:
        print(f"  fault: {fault}")
    return len(found)

"""Records with flows of every state that older versions left open, brought to their end by the program of today.

`README.md` says how they were made. Of its cases C1 to C14 some wait for a human, two were erased, and six orders are
in flight; C20 to C27 are sagas, each stopped somewhere else.
"""

from __future__ import annotations

import lzma
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.gates.refund.rail.store import Order
from sds.kernel.audit import verify
from sds.kernel.errors import ErasedError
from sds.kernel.flow.states import Answer
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry.contract_versions import recorded_contract
from sds.kernel.storage.store import SCHEMA_VERSION
from sds.kernel.storage.vault import Texts
from tests.kernel import sagas
from tests.kernel.durable import LEASE_MS, START_MS, World, refund, see_through
from tests.kernel.humans import SORRY, resolve
from tests.kernel.orders import recovered

pytestmark = pytest.mark.sqlite_alone("files that older versions wrote")

RECORDS = sorted(Path(__file__).parent.glob("claims_schema_*.sql.xz"))
OF_SAGAS_MS = 60_000  # the last case was opened within a minute
NOT_PAID = ("C5", "C6", "C8", "C11", "C26/1")  # ordered, and the rail never had the order or refused it
WAITING = ("C2", "C14")
SAGA_STATES = {
    20: ("CLOSED", None, ["SUCCESS", "SUCCESS"], None),
    21: ("ESCALATED", sagas.DIRTY, ["SUCCESS", None], "ALERT_HUMAN"),
    22: ("CLOSED", None, ["SUCCESS", "SUCCESS"], None),
    23: ("ESCALATED", sagas.DIRTY, ["SUCCESS", None], "REVERT"),
    24: ("ESCALATED", sagas.DIRTY, ["SUCCESS", None], "ALERT_HUMAN"),
    25: ("ESCALATED", sagas.DIRTY, ["SUCCESS", None], "ALERT_HUMAN"),
    26: ("ESCALATED", sagas.DIRTY, ["FAILED", None], "ALERT_HUMAN"),
    27: ("ESCALATED", sagas.DIRTY, ["SUCCESS", None], "ALERT_HUMAN"),
}


class Reopened(World):
    """The world of a record after every lease: its tickets, and a rail that has paid what it had paid."""

    def __init__(self, folder: Path, record: Path) -> None:
        with closing(sqlite3.connect(folder / "kernel.db")) as db:
            db.executescript(lzma.decompress(record.read_bytes()).decode())
            ((body,),) = db.execute("SELECT body FROM contracts").fetchall()
        super().__init__(folder, terms=recorded_contract(body), now_ms=START_MS + OF_SAGAS_MS + LEASE_MS)
        for number in range(1, 30):
            self.tickets.put(f"T{number}")
        orders = self.store.rows(
            "SELECT event_id, idempotency_key, kind, COALESCE(json_extract(params, '$.amount'), 1), resource_key, dfid"
            " FROM execution_log JOIN decision_flows USING (dfid) ORDER BY reserved_at_ms, dfid"
        )
        for event_id, *order in orders:
            if event_id not in NOT_PAID:
                self.rail._memory.pay(Order(*order))

    def case(self, number: int) -> Answer:
        return see_through(self.kernel, self.event(f"C{number}", f"T{number}"), refund())


@pytest.fixture(params=RECORDS, ids=lambda path: path.name.partition(".")[0])
def world(folder: Path, request: pytest.FixtureRequest) -> Iterator[Reopened]:
    made = Reopened(folder, request.param)
    yield made
    assert () == verify.verify(made.store).faults
    paid = [dfid for dfid, *_ in made.rail.paid()]
    assert len(paid) == len(set(paid))
    assert set(paid) == set(made.column("SELECT dfid FROM execution_log WHERE status = 'SUCCESS'"))
    made.close()


def test_there_is_a_record_of_more_than_one_schema():
    assert 2 <= len(RECORDS)


def test_everything_that_was_open_comes_to_its_end_and_nothing_is_paid_twice(world: Reopened):
    assert [SCHEMA_VERSION] == world.column("SELECT value FROM meta WHERE key = 'schema_version'")
    assert () == verify.verify(world.store).faults
    assert Recovered(interrupted=6, success=5, failed=1, sagas_ended=1, sagas_dirty=3) == recovered(world)
    again = recovered(world)
    assert (0, 0, 0, 0, ()) == (again.interrupted, again.success, again.failed, again.unknown, again.errors)
    ended = {number: world.case(number) for number in range(1, 15) if f"C{number}" not in WAITING}
    assert {"CLOSED"} == {answer.state for answer in ended.values()}
    assert [3] == [number for number, answer in ended.items() if answer.execution != "SUCCESS"]
    assert ["MODIFY", "MODIFY"] == [ended[number].resolution for number in (11, 12)]
    tickets = [ticket for _, ticket, *_ in world.rail.paid() if ticket in {f"T{number}" for number in ended}]
    assert sorted(tickets) == sorted({f"T{number}" for number in ended} - {"T3"})


def test_the_sagas_end_as_if_nobody_had_upgraded(world: Reopened):
    recovered(world)
    event = world.event
    for number, wanted in SAGA_STATES.items():
        world.event = lambda *_, number=number: event(f"C{number}", f"T{number}")  # type: ignore[misc,method-assign]
        found = sagas.run(world.kernel, world, sagas.Script())
        assert wanted == (found.answer.state, found.answer.tag, sagas.executions(found), found.compensation)
    recovered(world)


@pytest.mark.parametrize(("decision", "change"), [("MODIFY", SORRY), ("RETURN", ""), ("ABORT", "")])
def test_the_cases_that_wait_are_resolved(world: Reopened, decision: str, change: str):
    recovered(world)
    for number in (2, 14):
        (dfid,) = world.column("SELECT dfid FROM decision_flows WHERE event_id = ?", f"C{number}")
        assert "ESCALATED" == world.kernel.open(world.event(f"C{number}", f"T{number}")).state  # type: ignore[union-attr]
        answer = resolve(world, str(dfid), decision, change)  # type: ignore[arg-type]  # one of three
        assert (decision, "SUCCESS" if change else None) == (answer.resolution, answer.execution)
    if decision == "RETURN":
        assert "REFUND_TICKET" == world.case(2).action


def test_what_was_erased_stays_so_and_texts_of_others_are_read(world: Reopened):
    recovered(world)
    found = {}
    for event_id in ("C1", "C3", "C13"):
        (dfid,) = world.column("SELECT dfid FROM decision_flows WHERE event_id = ?", event_id)
        found[event_id] = str(dfid)
    assert any("please" in text for text in world.prompt(found["C1"]))
    for event_id in ("C3", "C13"):
        (stored,) = world.column("SELECT prompt FROM context_snapshots WHERE dfid = ?", found[event_id])
        with pytest.raises(ErasedError):
            Texts(world.store, found[event_id]).prompt(str(stored))

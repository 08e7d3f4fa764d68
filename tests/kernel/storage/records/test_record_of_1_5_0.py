"""A record that version 1.5.0 of the refund gate wrote, opened by the program of today: `README.md` says how.

Of its twelve events three were decided by the embedded model, one was handed to a human, one denied. Four orders are in
the air, one flow was only claimed, one saga is complete and one stopped behind its first step.
"""

from __future__ import annotations

import itertools
import lzma
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from sds.engines.factory import open_engine
from sds.gates.refund.rail.store import Order
from sds.host.clock import now_ms
from sds.kernel.audit import verify
from sds.kernel.contract.schema import load_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import Value
from sds.kernel.flow import intake
from sds.kernel.flow.states import Answer
from sds.kernel.operations.recovery import recover
from sds.kernel.registry.contract_versions import recorded_contract, registered_contract
from sds.pipeline import Stream
from sds.replay import opener, replay
from tests.kernel import sagas
from tests.kernel.durable import World, proposal, refund, see_through
from tests.kernel.humans import resolve

pytestmark = pytest.mark.sqlite_alone("a file that an older version wrote")

CONTRACT = Path(__file__).parents[2] / "contract" / "refund-1.5.0.yaml"  # as it shipped then
RECORD = Path(__file__).parent / "refund_1_5_0.sql.xz"
LATER_MS = 120_000  # every lease is over, and it is the same hour
NOBODY_SENT = ("flow-15007", "flow-15009")  # reserved, and the rail never had the order
IN_THE_AIR = ("flow-15006", "flow-15007", "flow-15008", "flow-15009")
FIELDS: Mapping[str, Value] = {
    "flight.carrier": "UA",
    "flight.number": 1545,
    "flight.origin": "EWR",
    "flight.dest": "IAH",
    "flight.cancelled": True,
    "flight.due": True,
    "flight.arr_delay_min": 0,
    "flight.dep_delay_min": 0,
    "flight.distance_m": 2_253_000,
    "flight.sched_dep_at": 1_385_990_000,
    "weather.condition": "clear",
    "ticket.fare_minor": 20_000,
    "ticket.refundable_minor": 20_000,
    "ticket.compensations_left": 1,
    "ticket.vouchers_left": 1,
}
TEXT = "My flight was cancelled. I want my money back."
FIRST_TEXT = "My flight was cancelled by the airline. I did not travel and want my money back."


class Reopened(World):
    """The world of the record, two minutes later: its tickets, and a rail that has paid what it had paid."""

    def __init__(self, folder: Path) -> None:
        with closing(sqlite3.connect(folder / "kernel.db")) as db:
            db.executescript(lzma.decompress(RECORD.read_bytes()).decode())
        super().__init__(folder, terms=load_contract(CONTRACT))
        self._numbers = itertools.count(16001)
        self.clock.advance(LATER_MS)
        for number in range(1, 14):
            key = f"TK-{number}"
            self.tickets.rows[key] = {**FIELDS, "ticket.customer": f"customer {number}"}
            self.tickets.versions[key] = 1
        for row in self.store.rows(
            "SELECT idempotency_key, kind, json_extract(params, '$.amount'), resource_key, dfid FROM execution_log"
            " ORDER BY reserved_at_ms"
        ):
            if (order := Order(*row)).dfid not in NOBODY_SENT:
                self.rail._memory.pay(order)

    def case(self, number: int, text: str = TEXT) -> intake.Event:
        said = {"claim_id": f"C-{number}", "ticket_id": f"TK-{number}", "claim_text": text}
        return intake.read_event(self.contract, said)

    def dump(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as db:
            return list(db.iterdump())


@pytest.fixture
def world(folder: Path) -> Iterator[Reopened]:
    made = Reopened(folder)
    yield made
    assert () == verify.verify(made.store).faults
    paid = [dfid for dfid, *_ in made.rail.paid()]
    assert len(paid) == len(set(paid))
    assert set(made.column("SELECT dfid FROM execution_log WHERE status = 'SUCCESS'")) <= set(paid)
    made.close()


def test_it_is_opened_and_verified_and_its_contract_is_the_one_that_shipped(world: Reopened):
    assert () == verify.verify(world.store).faults
    assert world.column("SELECT hash FROM contracts") == [world.contract.hash]
    assert "1.5.0" == world.contract.version
    assert world.contract == registered_contract(world.store, "refund")
    (body,) = world.column("SELECT body FROM contracts")
    assert world.contract.hash == recorded_contract(str(body)).hash


@pytest.mark.parametrize(
    ("number", "text", "known"),
    [
        (1, FIRST_TEXT, ("CLOSED", "COMPENSATE", {"amount": 40_000}, "SUCCESS", "PAY-00000001")),
        (4, TEXT, ("ESCALATED", "ESCALATE", {}, None, None)),
        (5, TEXT, ("CLOSED", "DENY", {}, None, None)),
    ],
)
def test_the_same_event_gets_its_stored_answer(
    world: Reopened, number: int, text: str, known: tuple[str, str, dict[str, int], str | None, str | None]
):
    before = world.dump()
    found = world.kernel.open(world.case(number, text))
    assert isinstance(found, Answer)
    assert known == (found.state, found.action, found.params, found.execution, found.reference)
    assert f"flow-1500{number}" == found.dfid
    assert before == world.dump()


def test_a_new_event_is_decided_and_carried_out(world: Reopened):
    paid = see_through(world.kernel, world.case(13), refund())
    assert ("CLOSED", "SUCCESS") == (paid.state, paid.execution)
    assert paid == world.kernel.open(world.case(13))


def test_what_was_in_the_air_is_settled_once_under_its_key_and_what_was_claimed_is_decided(world: Reopened):
    keys = world.column("SELECT idempotency_key FROM execution_log ORDER BY dfid")
    found = recover(world.kernel, now_ms=world.clock())
    assert (4, 0, 0, ()) == (found.success, found.failed, found.unknown, found.errors)
    assert keys == world.column("SELECT idempotency_key FROM execution_log ORDER BY dfid")
    for dfid in IN_THE_AIR:
        assert ["SUCCESS"] == world.column("SELECT status FROM execution_log WHERE dfid = ?", dfid)
    assert len(NOBODY_SENT) == len(world.rail.sent)
    assert "SUCCESS" == see_through(world.kernel, world.case(10), refund()).execution
    again = recover(world.kernel, now_ms=world.clock())
    assert (0, 0, ()) == (again.success, again.interrupted, again.errors)


def test_a_human_resolves_the_case_that_waits(world: Reopened):
    change = '{"action":"VOUCHER","params":{"amount":50.00},"reason":"GOODWILL"}'
    assert "SUCCESS" == resolve(world, "flow-15004", "MODIFY", change).execution


def test_the_saga_that_stopped_behind_its_first_step_is_seen_through(world: Reopened):
    def voucher(packet: DecisionPacket) -> bytes:
        said = Proposal("REFUND_VOUCHER", (("amount", "50.00"),), "WITH_REFUND", packet.snapshot.id)
        return write_proposal(said) if packet.event_id.endswith("/2") else proposal("DENY", "NOT_ELIGIBLE")(packet)

    world.event = lambda *_: world.case(12)  # type: ignore[method-assign]
    found = sagas.run(world.kernel, world, voucher, "REFUND_WITH_VOUCHER")
    assert ("CLOSED", ["SUCCESS", "SUCCESS"]) == (found.answer.state, sagas.executions(found))
    kinds = [kind for dfid, ticket, kind, _ in world.rail.paid() if ticket == "TK-12"]
    assert ["REFUND_TICKET", "REFUND_VOUCHER"] == kinds


@pytest.mark.parametrize("dfid", ["flow-15001", "flow-15002", "flow-15003"])
def test_a_decision_of_the_embedded_model_is_decided_again(world: Reopened, monkeypatch: pytest.MonkeyPatch, dfid: str):
    """To the bit on a machine like the one it was made on; elsewhere the account says what of the machine differs."""
    found = replay(world.store, dfid, open_it=opener(None, now_ms=now_ms), now_ms=now_ms)
    assert () == found.faults
    ours = {"proposal_schema", "weights", "mode", "prompt", "plan", "slots", "rows"}
    assert not ours & {one.name for one in found.circumstances}
    assert found.identical or (found.same_decision and found.circumstances)


def test_the_embedded_model_decides_on_in_it(world: Reopened):
    with closing(open_engine(None, now_ms=world.clock)) as engine:
        stream = Stream(world.kernel, engine, now_ms=world.clock, sleep=lambda _: None)
        assert "CLOSED" == stream.decide(world.case(13, FIRST_TEXT)).state

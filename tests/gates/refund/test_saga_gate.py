"""A refund in two steps on the real payment rail: its second step fails, and what was paid is taken back, once."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.gates.refund.chaos import FailSecond
from sds.gates.refund.gate import ensure_world, gate, load_refund_contract, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.rail.store import Order, PayoutStore
from sds.gates.runner import Watch, payments_of, wrongly_paid
from sds.host.clock import now_ms
from sds.kernel.audit import verify
from sds.kernel.contract.compiler import Rules
from sds.kernel.executor.protocol import Receipt
from sds.kernel.saga.state import SagaAnswer
from sds.models.llamacpp.backend import LlamaBackend
from tests.gates.refund.opened import open_refund
from tests.gates.refund.rail.orders import SOON_S, key_of, pay, post
from tests.gates.refund.rail.payouts import payouts
from tests.gates.refund.test_refund_policy import ON_TIME
from tests.proposers import Greedy

SAGA, STEPS = "REFUND_WITH_VOUCHER", ("REFUND_TICKET", "REFUND_VOUCHER")
CLAIMS = 120


class Desk:
    """A refund gate whose second steps fail, its rail, and the claims that have two steps."""

    def __init__(self, folder: Path, engine: object, *, fail_second: bool = True) -> None:
        self.folder, self.rails = folder, list[RailProcess]()
        self.watch = Watch()
        self.gate: Gate = open_refund(
            folder, engine=engine, on_reasoned=self.watch.reasoned, with_rail=self.rails.append
        )
        if fail_second:
            self.watch.chaos = FailSecond(folder, self, 0)  # type: ignore[arg-type]  # all it asks for is the process

    @property
    def rail(self) -> RailProcess:
        return self.rails[0]

    process = rail

    def claims(self) -> Iterator[dict[str, str]]:
        known = {row[0] for row in self.gate.store.rows("SELECT event_id FROM events")}
        for claim in read_queue(self.folder):
            packet = self.gate.preview(claim.event)
            both = "REFUND_TICKET" in packet.envelope.names and packet.snapshot.fields["ticket.vouchers_left"]
            if claim.event["claim_id"] not in known and both:
                yield claim.event

    def decide(self) -> SagaAnswer:
        return self.gate.decide_saga(SAGA, next(self.claims()))

    def faults(self) -> list[str]:
        return [*wrongly_paid(self.gate, gate, payments_of(self.gate, gate)), *verify.verify(self.gate.store).faults]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sagas")
    ensure_world(made, claims=CLAIMS)
    return made


@pytest.fixture
def desk(folder: Path) -> Iterator[Desk]:
    opened = Desk(folder, Greedy("REVERT", *STEPS))
    yield opened
    opened.rail.misbehave()
    assert [] == opened.faults()
    opened.gate.close()


def test_when_both_steps_are_paid_the_saga_is_closed(folder: Path) -> None:
    desk = Desk(folder, Greedy("REVERT", *STEPS), fail_second=False)
    found = desk.decide()
    assert ("CLOSED", None, None) == (found.answer.state, found.answer.tag, found.compensation)
    assert ["REFUND_TICKET", "REFUND_VOUCHER"] == [step.action for step in found.steps if step]
    assert [] == desk.faults()
    desk.gate.close()


def test_a_second_step_that_the_rail_declines_has_the_first_taken_back_and_the_books_balance(desk: Desk) -> None:
    before = payouts(desk.rail)
    found = desk.decide()
    after = payouts(desk.rail)
    assert ("ABORTED", "COMPENSATED", "REVERT") == (found.answer.state, found.answer.tag, found.compensation)
    assert ["SUCCESS", "FAILED"] == [step.execution for step in found.steps if step]
    first = found.steps[0]
    assert first is not None
    assert [first.params["amount"]] * 2 == [after[n] - before[n] for n in ("paid_minor", "reversed_minor")]
    assert (1, 1) == (after["reversed"] - before["reversed"], after["rejected"] - before["rejected"])
    assert 0 == desk.watch.out_of_envelope


def test_the_ticket_can_be_refunded_again_once_its_refund_was_taken_back(desk: Desk) -> None:
    claim = next(desk.claims())
    first = desk.gate.decide_saga(SAGA, claim).steps[0]
    desk.rail.misbehave()
    again = desk.gate.decide({**claim, "claim_id": "once more"})
    assert first is not None
    assert ("SUCCESS", first.params) == (again.execution, again.params)


def test_a_reversal_whose_reply_is_lost_is_looked_up_and_happens_once(desk: Desk) -> None:
    reasoned = desk.watch.reasoned
    desk.gate._on_reasoned = lambda packet, data: (
        desk.rail.misbehave(lose_replies=1.0) if packet.event_id.endswith("/compensation") else reasoned(packet, data)
    )
    before = payouts(desk.rail)["reversed"]
    found = desk.decide()
    assert ("COMPENSATED", 1) == (found.answer.tag, payouts(desk.rail)["reversed"] - before)


def test_a_rail_that_dies_before_the_reversal_leaves_it_unknown_until_recovery_has_looked(desk: Desk) -> None:
    reasoned = desk.watch.reasoned
    desk.gate._on_reasoned = lambda packet, data: (
        desk.rail.kill() if packet.event_id.endswith("/compensation") else reasoned(packet, data)
    )
    found = desk.decide()
    desk.rail.start()
    assert ("ESCALATED", "PARTIAL_SUCCESS_DIRTY") == (found.answer.state, found.answer.tag)
    assert ["UNKNOWN"] == list(found.reversals.values())
    desk.gate.recover()
    assert ["UNKNOWN"] == [
        row[0] for row in desk.gate.store.rows("SELECT status FROM saga_reversals WHERE status <> 'REVERTED'")
    ]


def test_the_embedded_model_chooses_from_the_menu_and_from_nothing_else(folder: Path, embedded: LlamaBackend) -> None:
    desk = Desk(folder, NativeEngine(embedded, now_ms=now_ms))
    found = desk.decide()
    assert 0 == desk.watch.out_of_envelope
    assert found.compensation in ("REVERT", "CLOSE_ALL", "ALERT_HUMAN")
    assert found.chosen is not None
    said = verify.flow_record(desk.gate.store, found.chosen.dfid)
    assert said is not None
    assert desk.gate.engine.model == said["policy_proposals"]["model"]
    assert "PARTIAL_SUCCESS_DIRTY" in str(verify.flow_record(desk.gate.store, found.answer.dfid))
    desk.rail.misbehave()
    assert [] == desk.faults()
    desk.gate.close()


def test_the_saga_gives_its_second_step_no_place_in_a_single_decision() -> None:
    contract = load_refund_contract()
    cancelled = {**ON_TIME, "flight.cancelled": True}
    assert "REFUND_VOUCHER" not in Rules(contract).envelope(cancelled).names
    mandate = Rules(contract, authority=("REFUND_VOUCHER",))
    assert ("DENY", "ESCALATE", "REFUND_VOUCHER") == mandate.envelope(cancelled).names
    assert ("DENY", "ESCALATE", "REFUND_VOUCHER") == mandate.envelope({**cancelled, "ticket.refundable_minor": 0}).names
    assert ("DENY", "ESCALATE") == mandate.envelope({**cancelled, "ticket.vouchers_left": 0}).names
    assert ("DENY", "ESCALATE") == mandate.envelope(ON_TIME).names


# --- the rail itself ------------------------------------------------------------------------------------------------


def test_what_was_paid_is_taken_back_once_however_often_it_is_asked(rail: RailProcess) -> None:
    executor, before = rail.executor(), payouts(rail)
    assert "settled" == pay(executor, "back", 700).status
    assert Receipt("absent") == executor.reverted(key_of("back"), SOON_S)
    with ThreadPoolExecutor(8) as pool:
        receipts = set(pool.map(lambda _: executor.revert(key_of("back"), SOON_S), range(16)))
    assert 1 == len(receipts)
    assert {executor.reverted(key_of("back"), SOON_S)} == receipts
    after = payouts(rail)
    assert (1, 700) == (after["reversed"] - before["reversed"], after["reversed_minor"] - before["reversed_minor"])
    assert "settled" == executor.lookup(key_of("back"), SOON_S).status


def test_what_was_never_paid_cannot_be_taken_back(rail: RailProcess) -> None:
    executor, refused = rail.executor(), Receipt("rejected", detail="nothing was paid under this key")
    assert refused == executor.revert(key_of("never"), SOON_S)
    executor.void(key_of("void-before"), SOON_S)
    assert refused == executor.revert(key_of("void-before"), SOON_S)
    rail.misbehave(refuse=1.0)
    pay(executor, "declined-before")
    rail.misbehave()
    assert refused == executor.revert(key_of("declined-before"), SOON_S)


def test_a_rail_that_declines_a_reversal_has_reversed_nothing(rail: RailProcess) -> None:
    executor = rail.executor()
    pay(executor, "kept")
    rail.misbehave(refuse=1.0)
    assert "rejected" == executor.revert(key_of("kept"), SOON_S).status
    assert "absent" == executor.reverted(key_of("kept"), SOON_S).status


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"key":7}', b'{"key":"short"}', b'{"key":null,"more":1}'])
def test_a_malformed_reversal_is_refused(rail: RailProcess, body: bytes) -> None:
    assert 400 == post(rail.port, "/revert", body)


def test_a_reversal_outlives_a_restart(tmp_path: Path) -> None:
    store = PayoutStore(tmp_path / "rail.db", lambda: 0)
    store.pay(Order(key_of("x"), "REFUND_TICKET", 500, "TKT-x", "dfid-x"))
    done = store.revert(key_of("x"))
    again = PayoutStore(tmp_path / "rail.db", lambda: 0)
    assert done == again.revert(key_of("x")) == again.reverted(key_of("x"))


def test_a_reversal_that_only_the_record_knows_is_a_case_and_so_is_one_that_only_the_rail_knows(
    folder: Path, tmp_path: Path
) -> None:
    desk = Desk(shutil.copytree(folder, tmp_path / "own"), Greedy("REVERT", *STEPS))
    first = desk.decide().steps[0]
    desk.rail.misbehave()
    second = desk.gate.decide({**next(desk.claims()), "claim_id": "paid, and taken back outside"})
    assert first is not None
    keys: dict[str, str] = dict(desk.gate.store.rows("SELECT dfid, idempotency_key FROM execution_log"))
    with closing(sqlite3.connect(desk.folder / "rail.db")) as db, db:
        assert 1 == db.execute("DELETE FROM reversals WHERE key = ?", (keys[first.dfid],)).rowcount
    assert "settled" == desk.rail.executor().revert(keys[second.dfid], SOON_S).status
    found = desk.gate.reconcile().differences
    assert {("NOT_REVERSED", first.dfid), ("REVERSED_OUTSIDE", second.dfid)} == {(d.code, d.dfid) for d in found}
    desk.gate.close()

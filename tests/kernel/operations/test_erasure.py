"""Erasing a case: its texts are gone for good, what was decided and paid stays, the chain verifies, and nothing else may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.audit.stored_decision import read_decided
from sds.kernel.errors import ErasedError, StoreError, UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow import decision_record, intake, undecided
from sds.kernel.flow.states import Answer, answer
from sds.kernel.human import cases
from sds.kernel.operations import erasure
from sds.kernel.operations.erasure import Erased
from sds.kernel.saga import state as saga
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.storage import sqlite, write_ahead
from sds.kernel.storage.store import Store
from sds.kernel.storage.vault import Texts, destroy
from tests.kernel.crashes import every_step
from tests.kernel.durable import LEASE_MS, World, contract, deny, escalate, nonsense, refund, see_through
from tests.kernel.faults import Crash, Faults, failing
from tests.kernel.humans import PAY, resolve
from tests.kernel.older import writing_in_clear
from tests.kernel.sagas import Script, run, terms
from tests.kernel.tampering import found_after
from tests.stores.opened import SQLITE, Chosen, opened_store
from tests.stores.records import emptied

AFTER = contract(more="rationale: {order: after, chars_max: 40}\nmemory: {entries_max: 4}\n")
WHY = "the texts of event `C1` were erased on 2013-12-02: the customer asked for it"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, terms=AFTER)
    yield made
    made.close()


def erase(
    world: World, event: str = "C1", store: Store | None = None, why: str = "the customer asked for it"
) -> Erased:
    at = world.clock()
    return erasure.erase(store or world.store, world.contract.gate, event, who="ada", reason=why, now_ms=at)


def refused(world: World, event: str = "C1") -> UsageError:
    """Return what refuses an erasure; nothing has changed by it."""
    kept = world.column("SELECT wrapped FROM case_keys"), verify.verify(world.store).head
    with pytest.raises(UsageError) as error:
        erase(world, event)
    assert kept == (world.column("SELECT wrapped FROM case_keys"), verify.verify(world.store).head)
    return error.value


def told(world: World) -> Answer:
    """Decide a case with a rejected attempt, and have it explained."""
    packet = world.packet()
    world.kernel.decide(packet, nonsense(packet))
    made = world.kernel.decide(packet, refund()(packet))
    world.explain(made.dfid, "never flown")
    return made


def test_the_texts_are_gone_and_everything_else_stays(world: World):
    dfid = told(world).dfid
    before = answer(world.store, dfid)
    assert Erased(dfid, ("C1",), (), Chosen.kind == SQLITE) == erase(world)  # else see `Store.remains`
    after = answer(world.store, dfid)
    assert before is not None
    assert after is not None
    assert ("NOT_TRAVELLED: never flown", "NOT_TRAVELLED: [erased]") == (before.justification, after.justification)
    assert (before.params, before.execution, before.reference) == (after.params, after.execution, after.reference)
    record = verify.flow_record(world.store, dfid) or {}
    assert {"claim_id": "C1", "text": "[erased]", "ticket_id": "T1"} == json.loads(
        record["decision_flows"]["trigger_event"]
    )
    assert (["[erased]"], "[erased]", "[erased]", "[erased]") == (
        json.loads(record["context_snapshots"]["prompt"]),
        record["policy_proposals"]["proposal"],
        record["attempts"][0]["proposal"],
        record["rationale"],
    )
    assert "[erased]" == cases.read_case(world.store, world.contract, dfid).trigger["text"]
    assert () == verify.verify(world.store).faults


def test_who_why_and_when_are_in_the_ledger_and_a_head_kept_before_still_holds(world: World):
    dfid, head = told(world).dfid, verify.verify(world.store).head
    erase(world)
    ((at, body),) = world.store.rows("SELECT at_ms, body FROM ledger WHERE kind = 'ERASED' AND dfid = ?", (dfid,))
    wanted = {"gate": "claims", "event_id": "C1", "events": ["C1"], "who": "ada", "reason": "the customer asked for it"}
    assert (world.clock(), wanted | {"tag": None}) == (at, json.loads(body))
    assert () == verify.verify(world.store, head).faults


def test_a_replay_says_why_it_cannot(world: World):
    dfid = told(world).dfid
    erase(world)
    with pytest.raises(ErasedError) as error:
        read_decided(world.store, dfid)
    assert (WHY, "ERASED") == (str(error.value), error.value.reason_code)


@pytest.mark.sqlite_alone("its files: what may stay in a server's, `sds erase` says")
def test_the_key_is_in_no_file_any_more(world: World):
    """Among many: rows that SQLite moved, and what it wrote before, are overwritten, too."""
    for number in range(300):
        world.decide(deny, f"C{number}")
    kept = dict(world.store.rows("SELECT event_id, wrapped FROM case_keys"))
    gone = [f"C{number}" for number in range(0, 300, 29)]
    assert all(erase(world, event).overwritten for event in gone)
    on_disk = b"".join(path.read_bytes() for path in world.folder.glob("kernel.db*"))
    assert [] == [event for event in gone if kept[event] in on_disk]
    assert all(kept[event] in on_disk for event in kept if event not in gone)


def test_while_another_reads_what_held_the_key_is_not_overwritten_yet_and_it_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    told(world)
    monkeypatch.setattr(write_ahead, "TRIES", 1)
    with world.store.frozen() as reader:
        reader.rows("SELECT 1 FROM meta")
        assert not erase(world).overwritten
    assert () == verify.verify(world.store).faults


def test_others_write_while_the_log_waits_for_a_reader_to_be_emptied(world: World, monkeypatch: pytest.MonkeyPatch):
    if not isinstance(world.store, sqlite.SqliteStore):
        pytest.skip("PostgreSQL empties its log by itself")
    told(world)
    with closing(sqlite.SqliteStore(world.store.path)) as other, world.store.frozen() as reader:

        def others_turn(_: float) -> None:
            with closing(reader), other.transaction():
                other.insert("resources", resource="R", epoch=0, drawn=0)

        reader.rows("SELECT 1 FROM meta")
        monkeypatch.setattr("time.sleep", others_turn)
        assert erase(world).overwritten
    assert "R" in world.column("SELECT resource FROM resources")


def test_a_log_that_cannot_be_emptied_is_told_and_does_not_deny_that_it_was_erased(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    def full() -> bool:
        raise StoreError("the store cannot be read: disk I/O error")

    told(world)
    monkeypatch.setattr(world.store, "truncate_log", full)
    assert not erase(world).overwritten
    assert 1 == len(world.column("SELECT 1 FROM erasures"))


def test_the_same_event_again_gets_its_answer_and_is_not_paid_again(world: World):
    made = told(world)
    erase(world)
    again = world.kernel.open(world.event())
    assert isinstance(again, Answer)
    assert (made.dfid, "SUCCESS", 1) == (again.dfid, again.execution, len(world.rail.sent))


def test_a_case_that_might_have_begun_afresh_does_not_once_it_is_erased(world: World):
    packet = world.packet()
    world.tickets.put("T1", refundable_minor=1)
    assert "STATE_DRIFT_DETECTED" == world.kernel.decide(packet, refund()(packet)).tag
    assert None is world.kernel.known(world.event())
    erase(world)
    again = world.kernel.open(world.event())
    assert isinstance(again, Answer)
    assert ("ABORTED", "ERASED", False) == (again.state, again.tag, again.retryable)
    assert again == world.kernel.known(world.event())
    with pytest.raises(UsageError, match="cannot be decided again"):
        undecided.refuse_unless_undecided(world.store, packet.dfid)
    with pytest.raises(ErasedError, match="were erased"):
        intake.recorded_event(world.store, world.contract, packet.dfid)
    assert {"C1"} == undecided.settled_events(world.store, world.contract)
    assert () == verify.verify(world.store).faults


def test_an_order_that_was_contradicted_stays_a_humans(world: World):
    world.rail.misfortunes = ["refuse"]
    made = world.decide(refund())
    intent = decision_record.read_order(world.store, made.dfid)
    assert intent is not None
    world.kernel.dispatcher.settle(intent, Receipt("settled", "late"))
    erase(world)
    assert "DIRTY" == getattr(answer(world.store, made.dfid), "tag", None)
    assert "ESCALATED" == getattr(world.kernel.open(world.event()), "state", None)
    assert () == verify.verify(world.store).faults


def test_nothing_more_is_said_of_an_erased_case(world: World):
    made = world.decide(refund())
    erase(world)
    with pytest.raises(ErasedError, match="were erased"):
        world.explain(made.dfid, "too late")
    assert [] == world.column("SELECT wrapped FROM case_keys")


def test_memory_goes_on_in_codes_and_numbers(world: World):
    """What was rejected without a number is no longer known; what was paid is."""
    told(world)
    packet = world.packet("C2")
    for amount in ("997.00", "998.00", "999.00"):
        world.kernel.decide(packet, refund(amount)(packet))
    assert "REFUND_TICKET 999.00: rejected" in "".join(world.packet("C3").texts)
    (dfid,) = world.column("SELECT dfid FROM events WHERE event_id = 'C2'")
    resolve(world, str(dfid), "ABORT")
    for event in ("C1", "C2"):
        erase(world, event)
    told_now = "".join(world.packet("C4").texts)
    assert ("REFUND_TICKET 40.00: paid" in told_now, "no proposal: rejected" in told_now) == (True, True)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_not_at_its_end_is_not_erased_and_the_mend_is_named(world: World):
    packet = world.packet()
    assert ("the case of event `C1` has not ended: its flow is ACTIVE", True) == (
        str(error := refused(world)),
        "sds recover" in error.hint,
    )
    world.kernel.decide(packet, escalate(packet))
    assert f"end the case first: sds escalations resolve {packet.dfid} --abort --reason TEXT" == refused(world).hint
    resolve(world, packet.dfid, "ABORT")
    assert ("C1",) == erase(world).events
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    assert "UNKNOWN" == world.decide(refund(), "C2").execution
    assert "the case of event `C2` has not ended: its flow is EXECUTING" == str(refused(world, "C2"))


def test_a_case_that_lost_its_texts_while_it_waits_is_shown_as_such_and_can_still_be_ended(world: World):
    """As no erasure of ours leaves one behind: a human reads it, may not override what they cannot read, may end it."""
    dfid = world.decide(escalate).dfid
    with world.store.transaction():
        destroy(world.store, "claims", ("C1",), who="ada", reason="asked for", now_ms=world.clock())
    (case,) = cases.waiting(world.store, world.contract)
    assert (False, "[erased]", None) == (case.damaged, case.trigger["text"], case.proposal)
    with pytest.raises(UsageError, match="the agent proposed nothing that could be carried out"):
        resolve(world, dfid, "OVERRIDE")
    assert "ABORTED" == resolve(world, dfid, "ABORT").state


def test_what_is_not_there_was_erased_or_has_no_reason_is_refused(world: World):
    told(world)
    assert "there is no event `nobody` of gate `claims` in the record" == str(refused(world, "nobody"))
    with pytest.raises(UsageError, match="a reason is needed"):
        erase(world, why=" ")
    erase(world)
    assert WHY == str(refused(world))


def test_what_an_older_version_wrote_in_clear_cannot_be_erased_and_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    with writing_in_clear(monkeypatch):
        world.decide(deny)
        packet = world.packet("C2")
    assert "have no key: an older version wrote them unencrypted" in str(refused(world))
    world.clock.advance(LEASE_MS)
    see_through(world.kernel, world.event("C2"), deny)
    assert (packet.dfid,) == erase(world, "C2").in_clear
    assert () == verify.verify(world.store).faults


# --- a human, a saga --------------------------------------------------------------------------------------------------


def test_what_a_human_decided_stays(world: World):
    made = world.decide(escalate)
    resolve(world, made.dfid, "MODIFY", PAY, acknowledged=True)
    erase(world)
    found = answer(world.store, made.dfid)
    assert found is not None
    assert ("MODIFY", "NOT_TRAVELLED", "SUCCESS") == (found.resolution, found.justification, found.execution)
    assert () == verify.verify(world.store).faults


def test_a_saga_is_erased_with_its_steps_and_no_step_alone(folder: Path):
    world = World(folder, terms=terms())
    done = run(world.kernel, world, Script())
    world.tickets.put("T2")
    world.kernel.decide(packet := world.packet("C1/3", "T2"), deny(packet))  # an outsider's event, named as a step is
    error = refused(world, "C1/1")
    assert ("event `C1/1` is a step of a saga", "erase the whole saga: --event C1") == (str(error), error.hint)
    assert (("C1", "C1/1", "C1/2"), ()) == ((found := erase(world)).events, found.in_clear)
    assert ["C1/3"] == world.column("SELECT event_id FROM case_keys")
    assert [("C1", "ada", world.clock())] == [
        (each.event_id, each.who, each.at_ms) for each in erasure.erasures(world.store, world.contract.gate)
    ]
    assert [None, "[erased]"] == [
        Texts(world.store, dfid, shown=True).text("", "enc1:") if dfid else None
        for dfid in ("", done.steps[0].dfid if done.steps[0] else "")
    ]
    assert done == saga.saga_answer(world.store, world.contract, done.answer.dfid)
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_saga_that_is_still_open_is_not_erased(folder: Path):
    world = World(folder, terms=terms())
    claim_saga(world.store, world.contract, "BOTH", world.event(), now_ms=world.clock())
    assert "ACTIVE" in str(refused(world))
    world.close()


# --- what verification finds ------------------------------------------------------------------------------------------


def test_a_key_that_is_gone_and_nobody_erased_is_found(world: World):
    told(world)
    world.packet("open")
    for event in ("C1", "open"):
        gone = (("DELETE FROM case_keys WHERE event_id = ?", (event,)),)
        assert (f"key of case claims/{event}: it is missing, although nobody erased the case",) == found_after(
            world, *gone
        )


def test_a_key_put_back_an_erasure_taken_back_and_one_made_up_are_found(world: World):
    told(world)
    (key,) = world.column("SELECT wrapped FROM case_keys")
    erase(world)
    back = "INSERT INTO case_keys VALUES ('claims', 'C1', ?)"
    assert ("key of case claims/C1: it still exists, although the case was erased",) == found_after(
        world, (back, (key,))
    )
    (line,) = found_after(world, ("DELETE FROM erasures", ()))
    assert line.startswith("erasure claims/C1: the table says None, the ledger ('ada', ")
    made_up = "INSERT INTO erasures VALUES ('claims', 'C2', 'me', 'x', 1)"
    assert ("erasure claims/C2: the table says ('me', 'x', 1), the ledger None",) == found_after(world, (made_up, ()))


def test_another_key_in_its_place_is_found(world: World):
    told(world)
    world.decide(deny, "C2")
    swapped = "UPDATE case_keys SET wrapped = (SELECT wrapped FROM case_keys WHERE event_id = 'C2')"
    assert ("key of case claims/C1: it is not the key that its texts are sealed with",) == found_after(
        world, (swapped, ())
    )


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM case_keys WHERE event_id = 'C2'",
        "UPDATE case_keys SET wrapped = wrapped",
        "INSERT INTO case_keys SELECT gate, 'C1', wrapped FROM case_keys",
        "DELETE FROM erasures",
        "UPDATE erasures SET reason = 'x'",
    ],
)
def test_the_tables_themselves_refuse_it(world: World, sql: str):
    told(world)
    world.decide(deny, "C2")
    erase(world)
    with pytest.raises(StoreError, match="the store refused"), world.store.transaction():
        world.store.run(sql)


def test_stopped_at_any_step_it_is_erased_whole_or_not_at_all(folder: Path):
    seen: set[tuple[int, int, int]] = set()

    def fresh() -> World:
        emptied(folder)
        world = World(folder, terms=AFTER)
        told(world)
        return world

    def stop_once(world: World, faults: Faults) -> bool:
        finished = False
        try:
            erase(world, store=opened_store(world.path, connect=failing(faults)))
            finished = True
        except Crash:
            pass
        finally:
            faults.bury()
        with closing(opened_store(world.path)) as store:
            assert () == verify.verify(store).faults
            count = "SELECT (SELECT count(*) FROM case_keys), (SELECT count(*) FROM erasures), count(*) FROM ledger"
            seen.add(store.rows(count + " WHERE kind = 'ERASED'")[0])  # type: ignore[arg-type]
            with suppress(ErasedError):
                erase(world, store=store)
            assert () == verify.verify(store).faults
        return finished

    assert every_step(fresh, stop_once) > 20
    assert {(1, 0, 0), (0, 1, 1)} == seen

"""An outside that forgets keys: what it calls absent, makes void or pays again after that is believed by nobody."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.definitions.definition import check_parts
from sds.kernel.errors import UsageError
from sds.kernel.executor.key_retention import CLOCK_MARGIN_MS
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import attest
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import registry
from sds.kernel.saga import compensation
from tests.kernel.durable import World, deny, refund, see_through, whole
from tests.kernel.orders import execution, left_hanging, recovered
from tests.kernel.sagas import CLOSE_ALL, DIRTY, REVERT, Script, most, parent, reversed_at, run, terms, with_misfortune
from tests.stores.records import kept, put_back

DAY_MS = 24 * 3_600_000
DEADLINES_MS = 2 * 5_000  # as the contract has them
TRUSTED_MS = DAY_MS - CLOCK_MARGIN_MS - DEADLINES_MS


def keeping(world: World, kept_ms: int | None) -> World:
    """Let the world's rail say for how long it remembers a key."""
    world.rail.keys_kept_ms = kept_ms  # type: ignore[attr-defined]  # an executor may have it
    world.kernel = world.open_kernel()
    return world


def forgets(world: World) -> None:
    """Let the rail forget every key; what it paid stays paid."""
    with closing(sqlite3.connect(world.folder / "rail.db")) as db, db:
        db.execute("UPDATE payouts SET key = 'forgotten ' || number")
        db.execute("DELETE FROM voided")


def unanswered(world: World) -> Answer:
    """Have an order paid of which nobody learns."""
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    answer = world.decide(refund())
    world.rail.blind = False
    assert "UNKNOWN" == answer.execution
    return answer


@pytest.fixture(params=[True, False], ids=["idempotent", "once only"])
def forgetful(folder: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with whole(keeping(World(folder, idempotent=request.param), DAY_MS)) as made:
        yield made


def test_an_order_that_may_be_forgotten_is_neither_sent_again_nor_voided_and_is_a_humans(forgetful: World):
    world = forgetful
    answer = unanswered(world)
    world.clock.advance(DAY_MS)
    forgets(world)
    assert [Recovered(unknown=1)] * 2 == [recovered(world) for _ in range(2)]
    assert (1, 1, ["UNKNOWN"], []) == (
        len(world.rail.sent),
        len(world.rail.paid()),
        execution(world),
        world.column("SELECT 1 FROM ledger WHERE kind = 'VOIDING'"),
    )
    assert ("executor.key_forgotten", {"dfid": answer.dfid}) in world.logged
    assert answer == see_through(world.kernel, world.event(), refund())
    assert 1 == len(world.rail.paid())


def test_an_order_whose_sender_died_before_it_was_recorded_as_unknown_is_no_other(forgetful: World):
    left_hanging(forgetful, paid=True)
    forgetful.clock.advance(DAY_MS)
    forgets(forgetful)
    assert Recovered(unknown=1) == recovered(forgetful)
    assert (1, 1) == (len(forgetful.rail.sent), len(forgetful.rail.paid()))


@pytest.mark.parametrize(("age_ms", "resolved"), [(TRUSTED_MS, True), (TRUSTED_MS + 1, False)])
def test_it_is_believed_until_a_margin_before_it_may_have_forgotten(world: World, age_ms: int, resolved: bool):
    keeping(world, DAY_MS)
    world.rail.misfortunes = ["drop"]
    world.decide(refund())
    world.clock.advance(age_ms)
    assert (Recovered(failed=1) if resolved else Recovered(unknown=1)) == recovered(world)
    assert resolved == bool(world.column("SELECT 1 FROM ledger WHERE kind = 'VOIDING'"))  # its spend window is over


def test_what_it_still_knows_settles_an_order_of_whatever_age(forgetful: World):
    unanswered(forgetful)
    forgetful.clock.advance(10 * DAY_MS)
    assert Recovered(success=1) == recovered(forgetful)
    assert 1 == len(forgetful.rail.paid())


def test_an_outside_that_remembers_for_ever_is_believed_for_ever(world: World):
    keeping(world, None)
    world.rail.misfortunes = ["drop"]
    world.decide(refund())
    world.clock.advance(1_000 * DAY_MS)
    assert Recovered(failed=1) == recovered(world)


def an_entry(world: World) -> None:
    registry.write_act(world.store, "RECOVER", who="ada", reason="a look", now_ms=world.clock())


@pytest.mark.parametrize("seen", [an_entry, lambda _world: None], ids=["in the ledger", "not yet in the ledger"])
def test_a_clock_that_was_set_back_shows_no_age_that_is_believed(forgetful: World, seen: Callable[[World], None]):
    """By what it shows the order is an hour old, and by what it has shown before, two days."""
    unanswered(forgetful)
    forgetful.clock.advance(2 * DAY_MS)
    an_entry(forgetful)
    forgetful.clock.advance(-2 * DAY_MS + 3_600_000)
    seen(forgetful)
    forgets(forgetful)
    assert Recovered(unknown=1) == recovered(forgetful)
    assert 1 == len(forgetful.rail.paid())


@pytest.mark.parametrize(
    ("stated", "became"), [(Receipt("settled", "B-7"), "SUCCESS"), (Receipt("rejected"), "FAILED")]
)
def test_a_human_is_believed_about_an_order_that_may_be_forgotten(forgetful: World, stated: Receipt, became: str):
    """That the outside knows nothing of it contradicts nobody, and nothing is made void there in their name."""
    dfid = unanswered(forgetful).dfid
    forgetful.clock.advance(DAY_MS)
    forgets(forgetful)
    who = {"who": "ada", "reason": "asked the bank", "acknowledged": True}
    answer = attest(forgetful.kernel, dfid, stated, now_ms=forgetful.clock(), **who)  # type: ignore[arg-type]  # by name
    assert became == answer.execution
    assert ["ada"] == forgetful.column("SELECT body ->> '$.by.who' FROM ledger WHERE kind = 'RESOLVED'")
    with closing(sqlite3.connect(forgetful.folder / "rail.db")) as db:
        assert [] == db.execute("SELECT * FROM voided").fetchall()


def test_a_record_put_back_sends_nothing_again_that_may_be_forgotten(folder: Path):
    """In the copy nobody knows the order's end; after it was made, recovery had the order paid."""
    world = keeping(World(folder), DAY_MS)
    world.rail.misfortunes = ["drop"]
    world.decide(refund())
    backup = kept(world.path)
    assert Recovered(success=1) == recovered(world)
    world.close()
    put_back(world.path, backup)
    again = World(folder)
    again.clock.advance(DAY_MS)
    keeping(again, DAY_MS)
    forgets(again)
    assert Recovered(unknown=1) == recovered(again)
    assert (0, 1) == (len(again.rail.sent), len(again.rail.paid()))
    again.close()


@pytest.fixture
def sagas(folder: Path) -> Iterator[World]:
    made = keeping(World(folder, terms=terms()), DAY_MS)
    yield made
    made.close()


def test_a_reversal_that_may_be_forgotten_is_not_asked_for_again(sagas: World):
    """It was taken back and nobody learned; taken back again, the customer would have paid for it."""
    run_until_reversal(sagas, Script(step_2=deny, compensation=REVERT))
    (saga, step) = sagas.store.row("SELECT saga, dfid FROM saga_reversals") or ("", "")
    with sagas.store.transaction():  # as it is where the process ended here
        sagas.store.run("UPDATE sagas SET phase = 'DIRTY' WHERE dfid = ?", (saga,))
    sagas.clock.advance(DAY_MS)
    with closing(sqlite3.connect(sagas.folder / "rail.db")) as db, db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute("UPDATE reversals SET key = 'forgotten'")
    assert "UNKNOWN" == compensation.reverse(sagas.kernel, saga, step, now_ms=sagas.clock())
    assert 1 == reversals(sagas)


def run_until_reversal(world: World, script: Script) -> None:
    revert = world.rail.revert

    def lost(key: str, deadline_s: float) -> Receipt:
        revert(key, deadline_s)
        world.rail.blind = True
        return Receipt("unknown")

    world.rail.revert = lost  # type: ignore[method-assign]
    run(world.kernel, world, script)
    world.rail.revert, world.rail.blind = revert, False  # type: ignore[method-assign]


def reversals(world: World) -> int:
    with closing(sqlite3.connect(world.folder / "rail.db")) as db:
        return int(db.execute("SELECT count(*) FROM reversals").fetchone()[0])


def test_closing_all_is_not_on_the_menu_where_what_is_open_may_be_forgotten(sagas: World):
    def step_2(packet: object) -> bytes:
        return with_misfortune(sagas, "drop", most(packet))  # type: ignore[arg-type]  # a packet

    keeping(sagas, 1)  # whatever it is asked about may be forgotten by then
    script = Script(step_2=step_2, compensation=CLOSE_ALL)
    found = run(sagas.kernel, sagas, script)
    assert (["1", "2"], ("ESCALATED", DIRTY, "ALERT_HUMAN"), []) == (
        script.asked,
        parent(found),
        reversed_at(sagas.folder),
    )


@pytest.mark.parametrize("kept", [0, -1, True, 1.5, "a day"])
def test_a_time_that_is_none_is_refused_where_the_gate_is_opened(world: World, kept: object):
    world.rail.keys_kept_ms = kept  # type: ignore[attr-defined]
    for opened in (lambda: check_parts(world.tickets, world.rail), world.open_kernel):
        with pytest.raises(UsageError, match="`keys_kept_ms` of the executor is not a time") as caught:
            opened()  # type: ignore[operator]
        assert "milliseconds" in caught.value.hint

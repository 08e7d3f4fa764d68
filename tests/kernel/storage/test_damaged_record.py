"""A damaged record: whatever stands in any cell, who reads it is told in one typed line, and verification names it."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import agent_history, stored_decision, verify
from sds.kernel.context import artifacts, memory
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import NOT_AS_WRITTEN, SdsError, StoreError
from sds.kernel.flow import states, undecided
from sds.kernel.human import cases
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations import recovery
from sds.kernel.registry import contract_versions, registry
from sds.kernel.storage.sqlite import SqliteStore
from tests.kernel.damage import VALUES, Cell, cells, damage, damaged
from tests.kernel.durable import World, refund
from tests.kernel.sagas import terms
from tests.kernel.tampering import MONITORED, full_record
from tests.scale import scale, seeded
from tests.stores.records import alone

pytestmark = pytest.mark.sqlite_alone("cells of any type and encoding, which no table of a server takes")

NEWER = terms(MONITORED, ("version: 1.0.0", "version: 9.0.0"))
UNSEALED = {("agents", "rejections"), ("meta", "key"), ("meta", "value")}  # of meta a store is not even opened


@dataclass(frozen=True)
class Recorded:
    """A whole record, to be copied, and what is known of it."""

    folder: Path
    dfids: tuple[str, ...]
    open_flows: frozenset[str]
    open_events: frozenset[str]
    now_ms: int

    def copied(self, name: str) -> Path:
        into = self.folder / name
        into.mkdir()
        for file in ("kernel.db", "rail.db"):
            shutil.copy(self.folder / file, into / file)
        return into

    @contextmanager
    def lent(self, name: str) -> Iterator[Path]:
        """Yield a copy that is gone afterwards: thousands of them would fill the memory that they lie in."""
        into = self.copied(name)
        try:
            yield into
        finally:
            shutil.rmtree(into)


@pytest.fixture
def recorded(folder: Path) -> Recorded:
    made = full_record(folder)
    dfids = tuple(str(dfid) for dfid in made.column("SELECT dfid FROM decision_flows"))
    unfinished = made.store.rows("SELECT dfid, event_id FROM decision_flows WHERE state = 'ACTIVE'")
    open_flows, open_events = (frozenset(map(str, column)) for column in zip(*unfinished, strict=True))
    now_ms = made.clock()
    made.close()
    return Recorded(folder, dfids, open_flows, open_events, now_ms)


def opened(recorded: Recorded, folder: Path) -> World:
    world = World(folder, terms=terms(MONITORED))
    world._numbers = itertools.count(500)
    world.clock.advance(recorded.now_ms - world.clock())
    for number in range(2, 9):
        world.tickets.put(f"T{number}")
    return world


def uses(world: World, recorded: Recorded) -> Iterator[Callable[[], object]]:
    """Everything that is done with a record: looking first, then deciding, recovering and being in control."""
    store, now_ms, desk = world.store, world.clock(), HumanReview(world.kernel, now_ms=world.clock)
    yield from of_flows(world, recorded, desk)
    yield lambda: registry.agents(store)
    for agent in ("claims-agent", "others-agent"):
        yield lambda agent=agent: agent_history.agent_record(store, agent, now_ms=now_ms)
    yield lambda: contract_versions.versions(store)
    yield lambda: contract_versions.registered_contract(store, "claims")
    yield lambda: cases.registered_terms(store, "claims")
    yield lambda: registry.refusal(store, NEWER, now_ms=now_ms)
    yield lambda: artifacts.listed(store)
    yield lambda: undecided.settled_events(store, world.contract)
    yield desk.waiting
    for event in ("paid", "escalated", "unknown", "drifted", "half settled", "a new one"):
        yield lambda event=event: decide(world, event)
    yield lambda: recovery.recover(world.kernel, now_ms=now_ms)
    yield lambda: registry.set_halted(store, True, by="me", reason="a test", now_ms=now_ms)
    yield lambda: memory.sweep(store, who="me", reason="a test", now_ms=now_ms)
    yield lambda: registry.register(store, NEWER, by="registry", now_ms=now_ms)


def of_flows(world: World, recorded: Recorded, desk: HumanReview) -> Iterator[Callable[[], object]]:
    for dfid in recorded.dfids:
        yield lambda dfid=dfid: verify.flow_record(world.store, dfid)
        yield lambda dfid=dfid: states.answer(world.store, dfid)
        yield lambda dfid=dfid: stored_decision.read_decided(world.store, dfid)
        yield lambda dfid=dfid: desk.view(desk.case(dfid))
    yield lambda: desk.resolve(recorded.dfids[0], Resolution("ABORT", "me", "a test"))


def decide(world: World, event: str) -> None:
    packet = world.kernel.open(world.event(event, "T6"))
    if isinstance(packet, DecisionPacket):
        world.kernel.decide(packet, refund("1.00")(packet))


def told(error: SdsError) -> None:
    assert 1 == len(str(error).splitlines()), error


def use_all(world: World, recorded: Recorded, *, bent: bool) -> None:
    """Do everything; what is raised is one typed line. A column of another type than declared may end in what Python says."""
    for use in uses(world, recorded):
        try:
            use()
        except SdsError as error:
            told(error)
        except NOT_AS_WRITTEN:
            if not bent:
                raise


def shows(cell: Cell, value: Any, recorded: Recorded, *, rechained: bool) -> bool:
    """Whether verification must find it: not a value that is the same, of an open flow, or chained anew."""
    of_open_flow = "dfid" in cell.columns and cell.row[cell.columns.index("dfid")] in recorded.open_flows
    if cell.table == "case_keys":  # the ledger has the digest of a case's key from its first decision on
        of_open_flow = cell.row[cell.columns.index("event_id")] in recorded.open_events
    of_open_saga = cell.table == "saga_reversals"
    same = cell.value == value
    return not (same or of_open_flow or of_open_saga or rechained or (cell.table, cell.column) in UNSEALED)


def test_whatever_stands_in_any_cell_is_told_in_one_line_and_named_by_verification(recorded: Recorded):
    """Wrong types, no UTF-8, no JSON, JSON of another form; with the ledger's hashes computed anew, and without."""
    rng = seeded(31)
    for number, cell in zip(range(scale(50, 20_000)), cells(recorded.folder / "kernel.db", rng), strict=False):
        value, raw = damaged(rng, cell.value)
        rechain = cell.table == "ledger" and rng.random() < 0.7
        print(number, cell.table, cell.column, ascii(value)[:200], f"raw={raw} rechain={rechain}")
        with recorded.lent(str(number)) as folder:
            try:
                damage(folder / "kernel.db", cell, value, raw=raw, rechain=rechain)
            except (sqlite3.Error, AttributeError, UnicodeError):  # refused by an index, or nothing that has a hash
                continue
            mended = rechain and cell.column in ("prev_hash", "entry_hash")  # computed anew
            bent = cell.bent_by(value, raw=raw) and not mended
            judge(recorded, folder, cell, value, rechained=rechain, bent=bent)


def judge(recorded: Recorded, folder: Path, cell: Cell, value: Any, *, rechained: bool, bent: bool) -> None:
    try:
        store = SqliteStore(folder / "kernel.db")
    except StoreError as error:
        told(error)
        return
    found = verify.verify(store).faults
    store.close()
    assert all(1 == len(fault.splitlines()) for fault in found)
    assert found or not shows(cell, value, recorded, rechained=rechained)
    assert not bent or any(fault.startswith("database: ") for fault in found) or cell.value == value
    try:
        world = opened(recorded, folder)
    except SdsError as error:
        told(error)
        return
    try:
        use_all(world, recorded, bent=bent)
    finally:
        world.close()


def test_a_file_that_is_damaged_anywhere_is_told_in_one_line(recorded: Recorded):
    """Bytes of the file itself, its schema among them: what SQLite says of it may be no text at all."""
    rng, whole = seeded(17), (recorded.folder / "kernel.db").read_bytes()
    for number in range(scale(60, 10_000)):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(rng.choice((100, 8192, len(data))))] = rng.randrange(256)
        data = data[: rng.choice((len(data), len(data), rng.randrange(len(data))))]
        with recorded.lent(str(number)) as folder:
            (folder / "kernel.db").write_bytes(data)
            try:
                store = SqliteStore(folder / "kernel.db")
            except StoreError as error:
                told(error)
                continue
            report = verify.verify(store)
            store.close()
        assert all(1 == len(fault.splitlines()) for fault in report.faults)


def test_a_case_whose_time_is_none_is_listed_as_damaged_and_hides_no_other(recorded: Recorded):
    folder = recorded.copied("one")
    with_time = next(
        cell
        for cell in cells(folder / "kernel.db", seeded(3))
        if (cell.table, cell.column) == ("dim_validations", "evaluated_at_ms") and "ESCALATED" in cell.row
    )
    damage(folder / "kernel.db", with_time, b"\xff", raw=False, rechain=False)
    world = opened(recorded, folder)
    listed = {case.dfid: case.damaged for case in cases.waiting(world.store, world.contract)}
    world.close()
    dfid = with_time.row[with_time.columns.index("dfid")]
    assert listed.get(dfid, True)
    assert 1 < len(listed)


def test_every_value_that_is_tried_is_of_another_kind():
    assert len(VALUES) == len({ascii(value) for value in VALUES})


def test_a_newer_contract_is_not_put_beside_one_that_cannot_be_read(recorded: Recorded):
    folder = recorded.copied("one")
    world = opened(recorded, folder)
    alone(world.store, "UPDATE contracts SET version = 'x'")
    newer: Contract = NEWER
    with pytest.raises(StoreError, match="the contracts in the record cannot be read"):
        registry.register(world.store, newer, by="registry", now_ms=world.clock())
    world.close()

"""What is on the disk when: a fresh flow may be lost with the power or a server that crashes, and nothing that was said of it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from signal import SIGQUIT

import psycopg
import pytest

from sds.benchmarks.lib.statements import traced_in
from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.postgres.store import PostgresStore
from sds.kernel.storage.sqlite import Connect, SqliteStore, connect
from sds.kernel.storage.store import Store
from tests.kernel.durable import SIGNER, World, deny, refund, witness
from tests.stores.server import fresh_schema
from tests.storms.servers import Server, postgresql


class Served(World):
    """A world whose record is on a server that can crash."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._server, self._schema = server, fresh_schema()
        super().__init__(folder)

    def open_store(self, how: Connect = connect) -> Store:
        store = PostgresStore(self._server.url, self._schema, witness=witness())
        store.unlock(Keyring(SIGNER))
        self._open.append(store)
        return store

    def crash(self) -> None:
        self._server.stop(SIGQUIT)
        self._server.start()

    def flows(self) -> list[object]:
        return self.column("SELECT dfid FROM decision_flows")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that writes to its disk what a commit has waited for, and hardly ever anything else."""
    with postgresql() as made:
        with psycopg.connect(made.url, autocommit=True) as db:
            db.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            db.execute("SELECT pg_reload_conf()")
        yield made


@pytest.fixture
def world(tmp_path: Path, server: Server) -> Iterator[Served]:
    with closing(Served(tmp_path, server)) as made:
        yield made


def test_a_fresh_flow_that_a_crash_undoes_is_refused_and_its_event_decided_anew(world: Served):
    packet = world.packet()
    world.crash()
    assert [] == world.flows()
    with pytest.raises(UsageError, match="no longer open") as refused:
        world.kernel.decide(packet, refund()(packet))
    assert ("FLOW_CLOSED", []) == (refused.value.reason_code, world.rail.sent)
    assert "SUCCESS" == world.decide(refund()).execution
    assert [packet.dfid] == world.flows()
    assert 1 == len(world.rail.paid())
    assert () == verify.verify(world.store).faults


def test_an_event_that_two_processes_decide_after_a_crash_is_paid_once(world: Served):
    first = world.packet()
    world.crash()
    second = world.packet()
    assert first.dfid == second.dfid
    assert "SUCCESS" == world.kernel.decide(first, refund()(first)).execution
    with pytest.raises(UsageError, match="no longer open"):
        world.kernel.decide(second, refund()(second))
    assert 1 == len(world.rail.paid())


def test_what_was_flushed_survives_a_crash(world: Served):
    packet = world.packet()
    world.store.flush()
    world.crash()
    assert [packet.dfid] == world.flows()


def test_what_was_answered_survives_a_crash_with_the_flow_before_it(world: Served):
    world.tickets.put("T2")
    answers = [world.decide(refund(), "C1", "T1"), world.decide(deny, "C2", "T2")]
    world.crash()
    assert answers == [world.kernel.known(world.event("C1", "T1")), world.kernel.known(world.event("C2", "T2"))]
    assert () == verify.verify(world.store).faults


def test_an_event_that_is_known_is_answered_only_with_what_is_on_the_disk(world: Served):
    """Its flow is interrupted, and handed to a human, by whoever comes with the event once more."""
    for _ in range(1 + world.contract.retry.restarts_max):
        assert isinstance(world.kernel.open(world.event()), DecisionPacket)
        world.clock.advance(10 * 60_000)
    answer = world.kernel.open(world.event())
    assert not isinstance(answer, DecisionPacket)
    assert "ESCALATED" == answer.state
    world.crash()
    assert answer == world.kernel.known(world.event())


def synchronous(seen: list[str]) -> list[str]:
    """Return what each transaction has waited for: what was set last before it began."""
    level, found = "FULL", list[str]()
    for statement in seen:
        level = statement.removeprefix("PRAGMA synchronous=") if "synchronous" in statement else level
        found += [level] * (statement == "BEGIN IMMEDIATE")
    return found


def test_in_a_file_all_transactions_of_a_decision_wait_for_the_disk_but_the_first(tmp_path: Path):
    with closing(World(tmp_path)) as world:
        seen: list[str] = []
        kernel = world.open_kernel(world.open_store(traced_in(seen)))
        for name, ticket in (("C1", "T1"), ("C2", "T2")):
            world.tickets.put(ticket)
            seen.clear()
            packet = kernel.open(world.event(name, ticket))
            assert isinstance(packet, DecisionPacket)
            assert "SUCCESS" == kernel.decide(packet, refund()(packet)).execution
            assert ["NORMAL", "FULL", "FULL"] == synchronous(seen)
        seen.clear()
        assert not isinstance(kernel.open(world.event()), DecisionPacket)
        assert ["NORMAL", "FULL"] == synchronous(seen)


class _Fails(sqlite3.Connection):
    at = ""

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self.at and sql.startswith(self.at):
            self.at = ""
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *values)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", ["PRAGMA synchronous=NORMAL", "BEGIN", "PRAGMA synchronous=FULL", "COMMIT"])
def test_whatever_fails_in_between_a_durable_transaction_waits_for_the_disk(tmp_path: Path, at: str):
    def opened(path: Path) -> _Fails:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_Fails)

    with closing(SqliteStore(tmp_path / "k.db", connect=opened)) as store:
        found = list[tuple[bool, int]]()
        store._db.at = at  # type: ignore[attr-defined]
        for durable in (False, True, True, False, True):
            with suppress(StoreError), store.transaction(durable=durable):
                found.append((durable, store._fetched("PRAGMA synchronous")[0][0]))
        assert ("", {(False, 1), (True, 2)}) == (store._db.at, set(found))  # type: ignore[attr-defined]


def test_a_file_without_the_frames_that_nothing_waited_for_is_whole_and_its_event_is_decided(tmp_path: Path):
    """As after a power cut: the log ends with the last frame that was written to the disk."""
    with closing(World(tmp_path)) as world:
        world.decide(refund("1.00"), "C0")
        log = world.path.with_name(f"{world.path.name}-wal")
        kept = log.stat().st_size
        world.packet()
        cut = tmp_path / "cut"
        cut.mkdir()
        for each in (world.path, log):
            shutil.copy(each, cut / each.name)
        with (cut / log.name).open("r+b") as file:
            assert kept < log.stat().st_size
            file.truncate(kept)
        with closing(SqliteStore(cut / world.path.name, witness=witness())) as store:
            kernel = world.open_kernel(store)
            assert () == verify.verify(store).faults
            assert kernel.known(world.event()) is None
            packet = kernel.open(world.event())
            assert isinstance(packet, DecisionPacket)
            assert "SUCCESS" == kernel.decide(packet, refund()(packet)).execution
            assert () == verify.verify(store).faults

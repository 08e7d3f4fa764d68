"""What is asked again and again reads by an index: it takes no longer because the record has grown."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import orders, verify
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.context import memory
from sds.kernel.errors import ContractError
from sds.kernel.executor.statement import CLOCKS_APART_MS
from sds.kernel.executor.wholeness import Wholeness
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.monitored import REACTIVATED
from sds.kernel.flow.undecided import WAITS
from sds.kernel.human import cases
from sds.kernel.human.review import HumanReview
from sds.kernel.registry import registry
from sds.kernel.registry.contract_versions import versions
from sds.kernel.saga import compensation, driver
from sds.kernel.saga import state as saga
from sds.kernel.storage.ledger import KEYS_LOST
from tests.kernel.durable import START_MS, World, contract, deny, escalate, refund
from tests.kernel.sagas import REVERT, Script, run, terms
from tests.stores.planned import Planned

# Agents, versions of contracts, the sagas that are open; orders by their time, of which the first is taken; a page of cases.
FEW = {
    "SCAN CONSTANT ROW",
    "SCAN a LEFT-JOIN",
    "SCAN contracts",
    "SCAN c",
    "SCAN s USING INDEX sagas_open",
    "SCAN e USING INDEX orders_by_time",
    "SCAN w",
}


def answered(kernel: Kernel) -> None:
    dfid = kernel.store.value("SELECT dfid FROM events WHERE gate = 'claims' AND event_id = 'C1'")
    assert ["REVERTED"] == list(saga.saga_answer(kernel.store, kernel.contract, dfid).reversals.values())


def waiting(kernel: Kernel) -> None:
    assert 2 == len(HumanReview(kernel, now_ms=lambda: kernel.now_ms).waiting())


def unfinished(kernel: Kernel) -> None:
    assert [] == driver.waiting(kernel, now_ms=kernel.now_ms)


def refused(kernel: Kernel) -> None:
    with suppress(ContractError):
        registry.register(kernel.store, terms(("1.0.0", "0.9.0")), by="operator", now_ms=kernel.now_ms)
    assert 1 == kernel.store.value("SELECT count(*) FROM ledger WHERE dfid = '' AND kind = 'REFUSED'")


def counted(kernel: Kernel) -> None:
    assert 2 == cases.count_waiting(kernel.store, "claims")


def shown(kernel: Kernel) -> None:
    dfid = kernel.store.value("SELECT dfid FROM events WHERE gate = 'claims' AND event_id = 'C1'")
    found = verify.flow_record(kernel.store, dfid)
    assert found
    assert found["children"]


def undecided_flows(kernel: Kernel) -> None:
    assert 0 == kernel.store.value(f"SELECT count(*) FROM decision_flows f WHERE f.parent_dfid = '' AND {WAITS}")


def looked_again(kernel: Kernel) -> None:
    assert [] == compensation.look_again(kernel, now_ms=kernel.now_ms, is_due=lambda _: True)


def acts(kernel: Kernel) -> None:
    agent = kernel.contract.agent_id
    found = agent_record(kernel.store, agent, now_ms=kernel.now_ms)
    assert found
    assert ["INITIALIZING", "ACTIVE"] == [each.status for each in found.moves]
    assert "" == registry.waits_for(kernel.store, agent)
    assert ["in force"] == [each.standing for each in versions(kernel.store)]
    assert (None, None) == (kernel.store.value(KEYS_LOST), kernel.store.value(REACTIVATED, (agent,)))


def booked(kernel: Kernel) -> None:
    assert 2 == len(orders.orders_page(kernel.store, "claims", 0, 1 << 53, after=(0, ""), limit=9))


def compared(kernel: Kernel) -> None:
    asked: list[int] = []

    def statement(since_ms: int, _: int) -> tuple[()]:
        asked.append(since_ms)
        return ()

    assert Wholeness(kernel.store, "claims", statement, now_ms=lambda: kernel.now_ms).doubt() is None
    assert [START_MS - CLOCKS_APART_MS] == asked


@pytest.mark.parametrize(
    "ask",
    [answered, waiting, unfinished, refused, counted, shown, undecided_flows, looked_again, acts, booked, compared],
)
def test_no_table_that_grows_with_the_record_is_read_whole(folder: Path, ask: Callable[[Kernel], None]):
    world, made = World(folder, terms=terms()), list[Planned]()

    def planned(path: Path) -> sqlite3.Connection:
        made.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Planned))
        return made[0]

    run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    world.tickets.put("T2")
    world.rail.misfortunes = ["drop"]
    world.decide(refund(), "C2", "T2")
    world.decide(escalate, "C3")
    kernel = world.open_kernel(world.open_store(planned))
    made[0].plans = []
    ask(kernel)
    assert made[0].plans
    assert set() == {step for step in made[0].plans if step.startswith("SCAN")} - FEW
    assert not [step for step in made[0].plans if "AUTOMATIC" in step]
    assert (ask is acts) == any("USING INDEX ledger_acts (kind=? AND <expr>=?)" in step for step in made[0].plans)
    world.close()


def test_a_page_of_orders_reads_those_that_are_open_and_the_ended_from_where_it_begins(world: World):
    opened, ended = (
        [row[3] for row in world.open_store()._fetched(f"EXPLAIN QUERY PLAN {page}", values)]  # type: ignore[attr-defined]
        for page, values in ((page, ("claims", 0, 0, "", 1 << 53, "", 9)) for page in orders.PAGES)
    )
    assert opened[0].startswith("SEARCH f USING INDEX flows_unfinished")
    assert ended[0].startswith("SEARCH e USING INDEX orders_by_end (<expr>>?")
    assert not [step for step in ended if "TEMP B-TREE" in step]


@pytest.mark.parametrize("page", cases.PAGES)
def test_of_the_cases_that_wait_only_those_of_the_page_are_read_whole(world: World, page: str):
    asked = f"EXPLAIN QUERY PLAN {page}", ("claims", *cases.BEFORE_ALL, 50)
    plan = [row[3] for row in world.open_store()._fetched(*asked)]  # type: ignore[attr-defined]  # how SQLite finds it
    placing, whole = plan[: plan.index("SCAN w")], plan[plan.index("SCAN w") :]
    assert ["f", "v" if "flows_waiting" in placing[1] else "e"] == [
        step.split()[1] for step in placing if step.startswith("SEARCH") and "one_decided" not in step
    ]
    assert "fpved" == "".join(step.split()[1] for step in whole if step.startswith("SEARCH"))


class Stepping(sqlite3.Connection):
    """A connection that counts the steps of SQLite's virtual machine: what it reads, whatever the clock says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0
        self.set_progress_handler(self._step, 1)

    def _step(self) -> int:
        self.steps += 1
        return 0


@pytest.mark.parametrize("scope", ["key", "agent"])
def test_what_is_remembered_is_read_in_as_many_steps_however_many_decisions_a_case_or_an_agent_has_had(
    folder: Path, scope: str
):
    made = list[Stepping]()

    def stepping(path: Path) -> sqlite3.Connection:
        made.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Stepping))
        return made[-1]

    def steps_after(decisions: range) -> int:
        for number in decisions:
            world.decide(deny, f"C{number}")
        before = made[0].steps
        assert memory.memory(store, world.contract, "T1", now_ms=world.clock())
        return made[0].steps - before

    world = World(folder, terms=contract(more=f"memory: {{scope: {scope}, entries_max: 3}}"))
    store = world.open_store(stepping)
    few = steps_after(range(memory.SCAN_MAX + 6))
    assert abs(steps_after(range(memory.SCAN_MAX + 6, 3 * memory.SCAN_MAX)) - few) <= few // 20
    world.close()
    store.close()

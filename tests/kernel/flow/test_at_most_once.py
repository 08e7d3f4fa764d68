"""At most once: threads, kernels and processes that race for the same event, or for the same ticket."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from tests.kernel.authority import halt
from tests.kernel.durable import (
    COMPENSATION_MINOR,
    SIGNER,
    Clock,
    Propose,
    Rail,
    Tickets,
    World,
    anything_else,
    compensate,
    contract,
    counters,
    if_permitted,
    intake,
    refund,
    see_through,
    together,
)
from tests.kernel.outside import FARE_MINOR
from tests.scale import limit_s, scale, seeded
from tests.stores.opened import opened_store

THREADS = 64
PROCESSES = 3


@pytest.fixture(params=[1, 2, 4], ids=["one kernel", "two stores", "four stores"])
def kernels(world: World, request: pytest.FixtureRequest) -> list[Kernel]:
    """Each SqliteStore is a connection of its own over the same file, as another process would have."""
    return [world.kernel, *(world.open_kernel(world.open_store()) for _ in range(request.param - 1))]


def refund_of(rng: Random) -> Propose:
    """Propose a random refund within the envelope, and something else once nothing is left."""
    share = rng.random()

    def propose(packet: DecisionPacket) -> bytes:
        kind = packet.envelope.kind("REFUND_TICKET")
        high = kind.params[0][1].hi if kind else 0
        return refund(f"{max(1, int(high * share)) / 100:.2f}")(packet)

    return if_permitted(propose, "REFUND_TICKET")


def test_64_threads_with_the_same_event_pay_once(world: World, kernels: list[Kernel]):
    answers = together(THREADS, lambda n: see_through(kernels[n % len(kernels)], world.event(), refund(f"{n + 1}.00")))
    assert 1 == len(world.rail.paid())
    assert 1 == len({(a.dfid, a.params["amount"]) for a in answers if isinstance(a, Answer)})
    assert [("CLOSED", None)] == world.store.rows("SELECT state, parent_dfid FROM decision_flows")
    assert () == verify.verify(world.store).faults


def test_64_threads_with_different_claims_on_one_ticket_never_pay_more_than_the_fare(
    world: World, kernels: list[Kernel]
):
    rng = seeded(64)
    proposers = [refund_of(rng) for _ in range(THREADS)]
    together(THREADS, lambda n: see_through(kernels[n % len(kernels)], world.event(f"C{n}"), proposers[n]))
    paid = world.rail.paid()
    assert 0 < sum(amount for *_, amount in paid) <= FARE_MINOR
    assert [1] * len(paid) == list(Counter(dfid for dfid, *_ in paid).values())
    assert dict(counters(world.store))["tickets:T1#ticket.refundable_minor"] == sum(amount for *_, amount in paid)
    assert () == verify.verify(world.store).faults


def test_64_threads_with_different_claims_on_one_ticket_compensate_at_most_once(world: World, kernels: list[Kernel]):
    propose = if_permitted(compensate, "COMPENSATE")
    together(THREADS, lambda n: see_through(kernels[n % len(kernels)], world.event(f"C{n}"), propose))
    assert [("T1", "COMPENSATE", COMPENSATION_MINOR)] == [row[1:] for row in world.rail.paid()]
    assert () == verify.verify(world.store).faults


def test_64_threads_with_one_packet_and_different_proposals_pay_once(world: World):
    """One flow, many proposals: the first to be concluded closes it for all others."""
    packet = world.packet()

    def decide(number: int) -> str:
        try:
            return world.kernel.decide(packet, refund(f"{number + 1}.00")(packet)).state
        except Exception as error:  # noqa: BLE001  told apart below
            return str(error)

    said = Counter(map(str, together(THREADS, decide)))
    assert {"CLOSED": 1, f"flow `{packet.dfid}` is no longer open": THREADS - 1} == said
    assert 1 == len(world.rail.paid())


def test_a_rail_that_loses_replies_under_load_is_never_paid_through_twice(world: World, kernels: list[Kernel]):
    rng = seeded(65)
    world.rail.misfortunes = [rng.choice(("lose", "drop", "raise", "refuse", "pay")) for _ in range(200)]
    for number in range(8):
        world.tickets.put(f"T{number}")
    proposers = [refund_of(rng) for _ in range(THREADS)]
    together(
        THREADS,
        lambda n: see_through(kernels[n % len(kernels)], world.event(f"C{n % 32}", f"T{n % 8}"), proposers[n % 32]),
    )
    paid = world.rail.paid()
    assert [1] * len(paid) == list(Counter(dfid for dfid, *_ in paid).values())
    sql = "SELECT event_id FROM decision_flows f JOIN execution_log e USING (dfid) WHERE e.status <> 'FAILED'"
    events = world.column(sql)
    assert len(events) == len(set(events))
    for number in range(8):
        assert sum(amount for _, ticket, _, amount in paid if ticket == f"T{number}") <= FARE_MINOR
    assert () == verify.verify(world.store).faults


def test_halting_stops_every_reservation_from_the_next_transaction_on(world: World, kernels: list[Kernel]):
    for number in range(16):
        world.tickets.put(f"T{number}")
    halted = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while len(world.rail.paid()) < 5:
                time.sleep(0.001)
            halt(world)
            halted.set()
        turn = 0
        while number and not (halted.is_set() and turn > 2):
            turn += 1
            event = world.event(f"C{number}.{turn}", f"T{number}")
            see_through(kernels[number % len(kernels)], event, if_permitted(refund("0.01"), "REFUND_TICKET"))

    together(16, work)
    (stopped_at,) = world.column("SELECT idx FROM ledger WHERE kind = 'HALT'")
    assert [] == world.column("SELECT idx FROM ledger WHERE kind = 'RESERVED' AND idx > ?", stopped_at)
    assert world.column("SELECT idx FROM ledger WHERE kind = 'DECIDED' AND idx > ?", stopped_at)
    assert () == verify.verify(world.store).faults


def _claim_everything(folder: str, seed: int, number: int, start: object) -> None:
    """Work through the same claims as every other process, in an order of its own."""
    rng, path = Random(seed + number), Path(folder)
    tickets = Tickets()
    for ticket in range(4):
        tickets.put(f"T{ticket}")
    terms = contract()
    events = [
        intake.read_event(terms, {"claim_id": f"C{n}", "ticket_id": f"T{n % 4}", "text": ""})
        for n in range(scale(24, 200))
    ]
    rng.shuffle(events)
    with closing(opened_store(path / "kernel.db")) as store:
        kernel = Kernel(
            terms,
            store,
            tickets,
            Rail(path / "rail.db"),
            SIGNER,
            now_ms=Clock(),
        )
        start.wait()  # type: ignore[attr-defined]  # a multiprocessing barrier
        for event in events:
            what = refund_of(rng) if rng.random() < 0.5 else if_permitted(compensate, "COMPENSATE")
            see_through(kernel, event, what if rng.random() < 0.9 else anything_else)


def test_processes_over_one_file_pay_every_claim_at_most_once(world: World):
    print("seed 66")
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(PROCESSES)
    children = [
        spawn.Process(target=_claim_everything, args=(str(world.folder), 66, number, start))
        for number in range(PROCESSES)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=limit_s(300))
    assert [0] * PROCESSES == [child.exitcode for child in children]
    paid = world.rail.paid()
    assert len(paid) == len({dfid for dfid, *_ in paid})
    events = world.column("SELECT event_id FROM decision_flows f JOIN execution_log e USING (dfid)")
    assert len(events) == len(set(events)) == len(paid)
    for ticket in range(4):
        kinds = [(kind, amount) for _, name, kind, amount in paid if name == f"T{ticket}"]
        assert sum(amount for kind, amount in kinds if kind == "REFUND_TICKET") <= FARE_MINOR
        assert [kind for kind, _ in kinds].count("COMPENSATE") <= 1
    assert () == verify.verify(world.store).faults

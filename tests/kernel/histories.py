"""Random histories of everything at once: agents, humans, operators, sagas, artifacts, deployments, crashes, recovery."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from sds.kernel.context import artifacts, memory
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.intake import Event, read_event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import HumanReview, Resolution, attest
from sds.kernel.operations import erasure, recovery
from sds.kernel.registry import registry
from sds.kernel.saga import driver
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.storage.store import Store
from tests.kernel.authority import AGENT
from tests.kernel.durable import (
    COMPENSATION_MINOR,
    Propose,
    Rail,
    World,
    compensate,
    contract,
    deny,
    escalate,
    goodwill,
    nonsense,
    proposal,
    refund,
)
from tests.kernel.faults import Crash, Faults, failing
from tests.kernel.humans import HUMAN, change
from tests.kernel.outside import FARE_MINOR
from tests.kernel.sagas import ALERT_HUMAN, CLOSE_ALL, REVERT, SAGAS, most
from tests.stores.opened import opened_store

TICKETS = ("T1", "T2", "T3", "T4", "T5")
HOUR_MS = 3_600_000
BY_AGENT, BY_HUMAN = 1_000, 5_000  # most of a GOODWILL
TURNS_MAX = 40
SAGA_EVENTS = tuple(f"S{number}" for number in range(1, 7))
EVENTS = (*(f"C{number}" for number in range(1, 13)), "S1/1", "S2/2", "S1", "S3/compensation")
PROPOSALS: tuple[Propose, ...] = (
    refund("40.00"),
    refund("150.00"),
    refund("200.01"),
    compensate,
    goodwill("5.00"),
    goodwill("50.00"),
    deny,
    escalate,
    nonsense,
    compensate,
    refund("1.00"),
    proposal("COMPENSATE", "NO_SUCH_REASON"),
)


@cache
def deployed(number: int, *, pauses: bool, alone: bool) -> Contract:
    """Return version `1.0.number`. Of five, one has lost a kind that agents have, one a kind of sagas, and one the name of
    a field of events; what loses a kind of agents revokes those that had it. `alone`: COMPENSATE is no kind of sagas only.
    """
    escalation = f"escalation: {{per_hour: 6, always: [DENY, GOODWILL], pauses_agent: {str(pauses).lower()}}}"
    changes = [
        ("escalation: {per_hour: 1000000}", escalation),
        ("version: 1.0.0", f"version: 1.0.{number}"),
        *([] if alone else [("authority: [COMPENSATE, ", "authority: [")]),
        ("rejections_to_suspend: 10", "rejections_to_suspend: 5"),
    ]
    changes += {
        2: [("REFUND_TICKET, GOODWILL, DENY", "REFUND_TICKET, DENY")],
        3: [("COMPENSATE", "REPLACE")],
        4: [("key: ticket_id", "key: booking")],
    }.get(number % 5, [])
    return contract(*changes, more=f"{SAGAS}{HUMAN}artifacts: {{names: [tariff]}}\n")


class BusyError(Exception):
    """Somebody else holds a flow: the caller comes again."""


class Watched(Rail):
    """A rail that looks, with everything it is asked to do, whether it may be asked for it now."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store: Store | None = None
        self.wrong: list[str] = []  # told later: the kernel takes whatever an executor raises for no answer

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._look(intent)
        return super().dispatch(intent, key, deadline_s)

    def _look(self, intent: ExecutionIntent) -> None:
        assert self.store is not None
        human = self.store.value("SELECT 1 FROM human_decisions WHERE dfid = ?", (intent.dfid,)) is not None
        status = self.store.value("SELECT status FROM agents")
        revoked = "SELECT 1 FROM decision_flows f JOIN contract_revocations USING (contract_hash) WHERE dfid = ?"
        largest = {"REFUND_TICKET": FARE_MINOR, "COMPENSATE": COMPENSATION_MINOR, "REPLACE": COMPENSATION_MINOR}
        wrong = {
            "under a halt": self.store.halted,
            f"while the agent is {status}": status == "RETIRED" or (not human and status != "ACTIVE"),
            "under a revoked contract": not human and self.store.value(revoked, (intent.dfid,)),
            "outside every envelope": not (
                0 < dict(intent.params)["amount"] <= largest.get(intent.kind, BY_HUMAN if human else BY_AGENT)
            ),
        }
        self.wrong += [f"{intent.dfid} was sent {what}" for what, so in wrong.items() if so]

    def revert(self, key: str, deadline_s: float) -> Receipt:
        assert self.store is not None
        sql = "SELECT phase FROM sagas s JOIN saga_reversals r ON r.saga = s.dfid WHERE idempotency_key = ?"
        if "DIRTY" != self.store.value(sql, (key,)):
            self.wrong.append(f"{key} was to be reversed outside a dirty saga")
        return super().revert(key, deadline_s)


class History:
    """One world and everybody who acts in it."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self.rng, self.pauses, self.alone = rng, rng.random() < 0.3, rng.random() < 0.5
        self.versions = [deployed(0, pauses=self.pauses, alone=self.alone)]
        self.world = World(folder, terms=self.versions[0])
        self.rail = Watched(folder / "rail.db")
        self.rail.store = self.world.store
        self.world.rail = self.rail
        self.world.kernel = self.world.open_kernel()
        self.done: list[str] = []
        for ticket in TICKETS:
            self.world.tickets.put(ticket, mood="angry")
        self.put_artifact()

    # --- what operators and the world do; never inside a crash

    def put_artifact(self) -> None:
        text = f"Tariff {self.rng.randrange(3)}."
        artifacts.put(self.world.store, "tariff", text, who="desk", reason="new", now_ms=self.world.clock())

    def retire_artifact(self) -> None:
        artifacts.retire(self.world.store, "tariff", who="desk", reason="old", now_ms=self.world.clock())

    def sweep(self) -> None:
        memory.sweep(self.world.store, who="desk", reason="due", now_ms=self.world.clock())

    def erase(self) -> None:
        """Whatever is not at its end refuses, and changes nothing."""
        event = self.rng.choice((*EVENTS, *SAGA_EVENTS))
        with suppress(UsageError):
            erasure.erase(self.world.store, "claims", event, who="op", reason="asked for", now_ms=self.world.clock())

    def halt(self) -> None:
        registry.set_halted(self.world.store, True, by="op", reason="wrong fares", now_ms=self.world.clock())

    def resume(self) -> None:
        registry.set_halted(self.world.store, False, by="op", reason="corrected", now_ms=self.world.clock())

    def suspend(self) -> None:
        self._move("SUSPENDED")

    def reactivate(self) -> None:
        self._move("ACTIVE")

    def _move(self, status: registry.Status) -> None:
        now_ms = self.world.clock()
        registry.transition(self.world.store, AGENT, status, by="operator", reason="because", now_ms=now_ms)

    def retire(self) -> None:
        if self.rng.random() < 0.1:
            self._move("RETIRED")

    def deploy(self) -> None:
        newer = deployed(len(self.versions), pauses=self.pauses, alone=self.alone)
        registry.register(self.world.store, newer, by="operator", now_ms=self.world.clock())
        self.versions.append(newer)

    def revoke(self) -> None:
        chosen = self.rng.choice(self.versions).hash
        registry.revoke(self.world.store, chosen, who="op", reason="wrong", now_ms=self.world.clock())

    def mood(self) -> None:
        ticket = self.rng.choice(TICKETS)
        self.world.tickets.put(ticket, mood=self.rng.choice(["calm", "angry"]))

    def outage(self) -> None:
        self.world.tickets.down = not self.world.tickets.down

    def blind(self) -> None:
        self.rail.blind = not self.rail.blind

    def later(self) -> None:
        self.world.clock.advance(self.rng.choice([1, 4_000, 31_000, 40_000, 40_000, HOUR_MS, 30 * HOUR_MS]))

    def meddle(self) -> None:
        """Something happens that nobody who decides has asked for."""
        often = [self.put_artifact, self.resume, self.resume, self.reactivate, self.reactivate, self.mood, self.later]
        seldom = [self.retire_artifact, self.halt, self.suspend, self.deploy, self.revoke, self.blind, self.outage]
        act = self.rng.choice([*often, *often, *seldom, self.sweep, self.erase, self.retire])
        self.done.append(f"  {act.__name__}")
        with suppress(SdsError):
            act()

    def mend(self) -> None:
        """Somebody puts right what keeps everybody from deciding, unless it is final."""
        self.done.append("  mend")
        self.world.tickets.down = self.rail.blind = False
        revoked = self.world.column("SELECT 1 FROM agents JOIN contract_revocations USING (contract_hash)")
        newer = [self.deploy] if revoked or self.rng.random() < 0.15 else []
        for act in (self.resume, self.reactivate, self.put_artifact, *newer):
            with suppress(SdsError):
                act()

    # --- what may crash

    def kernel(self, store: Store) -> Kernel:
        """Return a process of the contract in force; or, at times, one that has not been replaced yet."""
        terms = self.rng.choice([*self.versions[-2:], *[self.versions[-1]] * 4])
        kernel = self.world.open_kernel(store, terms=terms)
        kernel.commit = self.late(kernel.commit)  # type: ignore[method-assign]
        return kernel

    def late(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        """Let something happen at the last moment: all was looked at, and nothing is reserved yet."""

        def after(*given: object) -> Any:
            if self.rng.random() < 0.1:
                self.rng.choice([self.meddle, self.halt, self.suspend, self.revoke])()
            return commit(*given)

        return after

    def says(self, packet: DecisionPacket) -> bytes:
        if self.rng.random() < 0.15:
            self.meddle()
        if packet.event_id.endswith("/compensation"):
            return self.rng.choice([REVERT, REVERT, CLOSE_ALL, ALERT_HUMAN, deny])(packet)
        if "/" in packet.event_id and self.rng.random() < 0.7:
            return most(packet)
        return self.rng.choice(PROPOSALS)(packet)

    def ask(self, kernel: Kernel, event: Event) -> Answer:
        for _ in range(TURNS_MAX):
            opened = kernel.open(event)
            if isinstance(opened, Answer):
                if opened.pending:
                    raise BusyError
                return opened
            with suppress(UsageError):  # someone else ended the flow meanwhile
                while kernel.decide(opened, self.says(opened), Decoding()).pending:
                    pass
        raise AssertionError(f"event {event.id} has no end")

    def event(self, terms: Contract, name: str) -> Event:
        ticket = TICKETS[sum(name.encode()) % len(TICKETS)]
        return read_event(terms, {"claim_id": name, terms.event.key: ticket, "text": "please"})

    def decide(self, store: Store) -> None:
        kernel = self.kernel(store)
        self.ask(kernel, self.event(kernel.contract, self.rng.choice(EVENTS)))

    def run_saga(self, store: Store) -> None:
        kernel, clock = self.kernel(store), self.world.clock
        name = self.rng.choice(["BOTH", "ALL", "NO_UNDOING"])
        event = self.event(kernel.contract, self.rng.choice(SAGA_EVENTS))
        dfid = claim_saga(store, kernel.contract, name, event, now_ms=clock())
        driver.drive(kernel, dfid, self.ask, now_ms=clock)

    def recover(self, store: Store) -> None:
        kernel, clock = self.kernel(store), self.world.clock
        recovery.recover(kernel, now_ms=clock())
        for dfid in driver.waiting(kernel, now_ms=clock()):
            driver.drive(kernel, dfid, self.ask, now_ms=clock)

    def human(self, store: Store) -> None:
        """Somebody takes a case; somebody else may have taken it before, or wants it, too."""
        desk = HumanReview(self.kernel(store), now_ms=self.world.clock)
        desk._commit = self.late(desk._commit)  # type: ignore[method-assign]
        cases = desk.waiting()
        if not cases:
            return
        case = self.rng.choice(cases)
        seen = desk.view(case).seen if self.rng.random() < 0.7 else ""
        if self.rng.random() < 0.2:
            self.meddle()
        text = self.rng.choice(
            [
                change("GOODWILL", "APOLOGY", amount="50.00"),
                change("REFUND_TICKET", "NOT_TRAVELLED", amount="40.00"),
                change("COMPENSATE", "LONG_DELAY"),
                change("DENY", "NOT_ELIGIBLE"),
            ]
        )
        decision = self.rng.choice(["OVERRIDE", "MODIFY", "MODIFY", "ABORT"])
        wanted = Resolution(decision, "ada", "looked", text, seen, acknowledged=True)  # type: ignore[arg-type]  # one of three
        desk.resolve(case.dfid, wanted)
        with suppress(SdsError):
            desk.resolve(case.dfid, Resolution("ABORT", "bob", "me, too"))
            raise AssertionError("a case was resolved twice")

    def attest(self, store: Store) -> None:
        """A human finds out about an order at the rail, and says what is so."""
        kernel = self.kernel(store)
        rows = store.rows("SELECT dfid FROM execution_log WHERE status = 'UNKNOWN'")
        if rows:
            (dfid,) = self.rng.choice(rows)
            paid = dfid in {payment[0] for payment in self.rail.paid()}
            said = Receipt("settled", "PAY") if paid else Receipt("rejected")
            now_ms = self.world.clock()
            attest(kernel, dfid, said, who="ada", reason="asked them", acknowledged=True, now_ms=now_ms)

    # --- one act after the other

    def act(self) -> None:
        if self.rng.random() < 0.2:
            self.meddle()
            return
        if self.rng.random() < 0.4:
            self.mend()
        acts = [
            self.decide,
            self.decide,
            self.run_saga,
            self.run_saga,
            self.human,
            self.human,
            self.attest,
            self.recover,
        ]
        act = self.rng.choice(acts)
        fates = ["pay", "pay", "pay", "pay", "lose", "drop", "refuse", "raise"]
        self.rail.misfortunes = self.rng.choices(fates, k=6)
        self.done.append(f"{act.__name__} {self.rail.misfortunes}")
        if self.rng.random() < 0.35:
            self.crash(act)
        else:
            with suppress(SdsError, BusyError):
                act(self.world.store)

    def crash(self, act: Callable[[Store], None]) -> None:
        """Do it in a process that stops at some step."""
        faults = Faults()
        store = opened_store(self.world.path, connect=failing(faults))
        faults.at = len(faults.steps) + self.rng.randrange(1, 200)
        self.world.tickets.live_through(faults)
        self.rail.live_through(faults)
        with suppress(SdsError, BusyError, Crash):
            act(store)
        faults.bury()
        self.world.tickets.live_through(Faults())
        self.rail.live_through(Faults())

    def resolve(self) -> None:
        """Have everything resolved that can be: the rail answers, every lease is over, recovery comes by."""
        self.rail.blind, self.rail.misfortunes, self.world.tickets.down = False, [], False
        kernel = self.world.open_kernel(terms=self.versions[-1])
        for _ in range(3):
            self.world.clock.advance(HOUR_MS)
            recovery.recover(kernel, now_ms=self.world.clock())
            for dfid in driver.waiting(kernel, now_ms=self.world.clock()):
                driver.drive(kernel, dfid, self.ask, now_ms=self.world.clock)

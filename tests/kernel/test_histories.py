"""Random histories of everything at once: agents, humans, operators, sagas, artifacts, deployments, crashes, recovery.

After each act the record is verified and set against the rail's own books; in the end everything is resolved, and what
is drawn and spent is what the rail has paid and not taken back.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from sds.kernel import artifacts, audit, context_store, recovery, registry, saga, saga_drive
from sds.kernel.answer import Answer
from sds.kernel.attest import attest
from sds.kernel.contract import Contract
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor import ExecutionIntent, Receipt
from sds.kernel.human import HumanDesk, Resolution
from sds.kernel.intake import Event, read_event
from sds.kernel.packet import DecisionPacket, Decoding
from sds.kernel.runtime import Kernel
from sds.kernel.store import Store
from tests.kernel.durable import (
    COMPENSATION_MINOR,
    FARE_MINOR,
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
from tests.kernel.sagas import ALERT_HUMAN, CLOSE_ALL, REVERT, SAGAS, most
from tests.scale import scale, seeded

AGENT = "claims-agent"
TICKETS = ("T1", "T2", "T3", "T4", "T5")
HOUR_MS = 3_600_000
BY_AGENT, BY_HUMAN = 1_000, 5_000  # most of a GOODWILL
TURNS_MAX = 40
AT_REST = ("CLOSED", "ABORTED", "ESCALATED")
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
        self.waited: set[str] = set()
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
        context_store.sweep(self.world.store, who="desk", reason="due", now_ms=self.world.clock())

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
        act = self.rng.choice([*often, *often, *seldom, self.sweep, self.retire])
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
        kernel.conclude = self.late(kernel.conclude)  # type: ignore[method-assign]
        return kernel

    def late(self, conclude: Callable[..., Any]) -> Callable[..., Any]:
        """Let something happen at the last moment: all was looked at, and nothing is reserved yet."""

        def after(*given: object) -> Any:
            if self.rng.random() < 0.1:
                self.rng.choice([self.meddle, self.halt, self.suspend, self.revoke])()
            return conclude(*given)

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
        dfid = saga.claim(store, kernel.contract, name, event, dfid=kernel._new_id(), now_ms=clock())
        saga_drive.drive(kernel, dfid, self.ask, now_ms=clock)

    def recover(self, store: Store) -> None:
        kernel, clock = self.kernel(store), self.world.clock
        recovery.recover(kernel, now_ms=clock())
        for dfid in saga_drive.waiting(kernel, now_ms=clock()):
            saga_drive.drive(kernel, dfid, self.ask, now_ms=clock)

    def human(self, store: Store) -> None:
        """Somebody takes a case; somebody else may have taken it before, or wants it, too."""
        desk = HumanDesk(self.kernel(store), now_ms=self.world.clock)
        desk._conclude = self.late(desk._conclude)  # type: ignore[method-assign]
        cases = desk.waiting()
        if not cases:
            return
        case = self.rng.choice(cases)
        seen = desk.look(case).seen if self.rng.random() < 0.7 else ""
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
        store = Store(self.world.path, connect=failing(faults))
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
            for dfid in saga_drive.waiting(kernel, now_ms=self.world.clock()):
                saga_drive.drive(kernel, dfid, self.ask, now_ms=self.world.clock)
        self.check()
        store = self.world.store
        assert [] == store.rows("SELECT dfid, state FROM decision_flows WHERE state NOT IN (?, ?, ?)", AT_REST)
        assert [] == store.rows("SELECT dfid, phase FROM sagas WHERE phase <> 'ENDED'")
        self.check_totals()

    # --- what must be so

    def reversed(self) -> set[str]:
        sql = "SELECT dfid FROM reversals r JOIN payouts USING (key)"
        with closing(sqlite3.connect(self.world.folder / "rail.db")) as db:
            return {dfid for (dfid,) in db.execute(sql)}

    def check(self) -> None:
        store, paid, back = self.world.store, self.rail.paid(), self.reversed()
        assert () == audit.verify(store).faults
        assert not self.rail.wrong, self.rail.wrong
        assert len(paid) == len({payment[0] for payment in paid}), "a flow was paid twice"
        amounts = {dfid: (ticket, kind, amount) for dfid, ticket, kind, amount in paid}
        orders = store.rows(
            "SELECT e.dfid, resource_key, kind, json_extract(params, '$.amount'), e.status, COALESCE(r.status, '')"
            " FROM execution_log e LEFT JOIN saga_reversals r USING (dfid)"
        )
        assert amounts.keys() <= {order[0] for order in orders}, "paid, and no order for it"
        for dfid, ticket, kind, amount, status, reversal in orders:
            if status == "SUCCESS":
                assert (ticket, kind, amount) == amounts.get(dfid), f"{dfid} is recorded as paid"
            assert status != "FAILED" or dfid not in amounts, f"{dfid} is recorded as failed, and was paid"
            assert status != "DIRTY", f"{dfid}: this rail never contradicts itself"
            assert reversal != "REVERTED" or dfid in back, f"{dfid} is recorded as taken back"
            assert dfid not in back or reversal in ("PENDING", "UNKNOWN", "REVERTED"), f"{dfid} was taken back"
        self.check_tickets(paid, back)
        self.check_cases()
        self.check_sagas(set(amounts), back)

    def check_tickets(self, paid: list[tuple[str, str, str, int]], back: set[str]) -> None:
        net: Counter[tuple[str, str]] = Counter()
        for dfid, ticket, kind, amount in paid:
            net[ticket, kind.replace("REPLACE", "COMPENSATE")] += 0 if dfid in back else amount
        for ticket in TICKETS:
            assert net[ticket, "REFUND_TICKET"] <= FARE_MINOR, f"{ticket}: more than its fare"
            assert net[ticket, "COMPENSATE"] <= COMPENSATION_MINOR, f"{ticket}: compensated twice"
        assert not self.world.column("SELECT 1 FROM spend_totals WHERE scope LIKE '%/customer/%' AND used > 100000")

    def check_cases(self) -> None:
        """What was handed to a human is there until a human has resolved it."""
        store = self.world.store
        now = {row[0] for row in store.rows("SELECT dfid FROM decision_flows WHERE state = 'ESCALATED'")}
        self.waited |= now
        resolved = {row[0] for row in store.rows("SELECT dfid FROM human_decisions")}
        assert now == self.waited - resolved
        listed = {c.dfid for c in HumanDesk(self.world.kernel, now_ms=self.world.clock).waiting()}
        parts = {
            row[0] for row in store.rows("SELECT dfid FROM decision_flows WHERE trigger_event LIKE '%\"saga\":[%'")
        }
        assert now - parts <= listed, "only a part of a saga waits as its saga does"
        unknown = store.rows("SELECT dfid FROM execution_log WHERE status = 'UNKNOWN'")
        assert {row[0] for row in unknown} <= listed

    def check_sagas(self, paid: set[str], back: set[str]) -> None:
        store = self.world.store
        for dfid, state, tag in store.rows(
            "SELECT s.dfid, state, tag FROM sagas s JOIN decision_flows USING (dfid) WHERE phase = 'ENDED'"
        ):
            of_saga = store.rows(
                "SELECT dfid FROM decision_flows WHERE json_extract(trigger_event, '$.saga[0]') = ?", (dfid,)
            )
            kept = {row[0] for row in of_saga} & paid - back
            steps = len(store.value("SELECT steps FROM sagas WHERE dfid = ?", (dfid,)).split(","))
            if state == "CLOSED":
                assert steps == len(kept), f"saga {dfid} is complete"
            elif tag != saga.DIRTY:
                assert not kept, f"saga {dfid} is {tag}: nothing of it stands"

    def check_totals(self) -> None:
        """Nothing is unknown any more: what is drawn is what was paid and stands."""
        back, unclear = self.reversed(), self.world.column("SELECT 1 FROM saga_reversals WHERE status <> 'REVERTED'")
        assert not [status for status in unclear if status == "PENDING"]
        drawn: Counter[str] = Counter()
        for dfid, ticket, kind, amount in self.rail.paid():
            if dfid not in back and kind != "GOODWILL":
                field, taken = ("refundable_minor", amount) if kind == "REFUND_TICKET" else ("compensations_left", 1)
                drawn[f"tickets:{ticket}#ticket.{field}"] += taken
        assert drawn == Counter(dict(self.world.store.rows("SELECT resource, drawn FROM resources WHERE drawn > 0")))
        spent = sum(amount for dfid, _, _, amount in self.rail.paid() if dfid not in back)
        assert spent == sum(
            row[0] for row in self.world.store.rows("SELECT used FROM spend_totals WHERE scope LIKE '%/day/%'")
        )


def live(seed: int, acts: int) -> None:
    """Live through one history; a failure says which, and what was done in it."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108  a random name
        history = History(Path(folder), Random(seed))
        try:
            for _ in range(acts):
                history.act()
                history.check()
            history.resolve()
        except BaseException:
            print(f"history {seed}", *history.done, sep="\n")
            raise
        finally:
            history.world.close()


def test_after_any_history_the_record_is_whole_and_says_what_the_rail_did():
    rng = seeded(2013)
    for _ in range(scale(12, 600)):
        live(rng.randrange(2**32), acts=scale(25, 60))

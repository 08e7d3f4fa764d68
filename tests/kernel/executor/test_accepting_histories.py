"""After any history with an outside that accepts first, no event is paid twice, none is lost, and each ends or waits visibly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import SdsError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt, Settlement
from sds.kernel.human.review import HumanReview, attest
from sds.kernel.operations.recovery import recover
from sds.kernel.storage.store import Store
from tests.kernel.durable import LEASE_MS, World, refund
from tests.kernel.faults import Crash, Faults, failing
from tests.scale import scale
from tests.stores.opened import opened_store

TICKETS = {"C1": "T1", "C2": "T2", "C3": "T3"}
STOPS = st.just(0) | st.integers(1, 120)
ANSWERS = st.sampled_from(["honest", "silent", "absent", "refusing"])


class Clearing:
    """It accepts every order, and carries it out or refuses it later. What it says of an order depends on `answers`:

    `silent`: nothing; `absent`: that it does not know an order that it has accepted and not ended; `refusing`: that it
    refuses what it accepts. It never forgets what has ended or is void, and a key has one effect at most.
    """

    def __init__(self, *, idempotent: bool) -> None:
        self.idempotent, self.answers = idempotent, "honest"
        self.orders: dict[str, Settlement] = {}
        self.events: dict[str, str] = {}
        self.faults = Faults()

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.faults.step("before dispatch")
        self.orders.setdefault(key, "pending")
        self.events[key] = intent.dfid
        self.faults.step("after dispatch")
        return Receipt("rejected") if self.answers == "refusing" else self._said(key)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        self.faults.step("before lookup")
        return self._said(key)

    def void(self, key: str, deadline_s: float) -> Receipt:
        self.faults.step("before void")
        self.orders.setdefault(key, "rejected")
        self.faults.step("after void")
        return Receipt("unknown") if self.answers == "silent" else Receipt(self.orders[key], key[:8])

    def _said(self, key: str) -> Receipt:
        status = self.orders.get(key, "absent")
        if self.answers == "silent":
            return Receipt("unknown")
        return Receipt("absent" if self.answers == "absent" and status == "pending" else status, key[:8])


class AcceptingHistory(RuleBasedStateMachine):
    """One record, its processes, and a human who only says what is so."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.world = World(Path(self._folder.name))
        self.outside = Clearing(idempotent=True)
        for ticket in TICKETS.values():
            self.world.tickets.put(ticket)

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            self.world.close()
            self._folder.cleanup()

    @rule(idempotent=st.booleans())
    def is_idempotent(self, idempotent: bool) -> None:
        self.outside.idempotent = idempotent

    @rule(data=st.data(), status=st.sampled_from(["settled", "settled", "rejected"]))
    def ends(self, data: st.DataObject, status: Settlement) -> None:
        if pending := sorted(key for key, was in self.outside.orders.items() if was == "pending"):
            self.outside.orders[data.draw(st.sampled_from(pending))] = status

    @rule(ms=st.sampled_from([1_000, LEASE_MS + 1, 3_600_000]))
    def later(self, ms: int) -> None:
        self.world.clock.advance(ms)

    @rule(name=st.sampled_from(sorted(TICKETS)), at=STOPS, answers=ANSWERS)
    def sends(self, name: str, at: int, answers: str) -> None:
        self.outside.answers = answers
        self._in_a_process(at, lambda store: self._decide(store, name))

    @rule(at=STOPS, answers=ANSWERS)
    def recovers(self, at: int, answers: str) -> None:
        self.outside.answers = answers
        self._in_a_process(at, self._recover)

    @rule(data=st.data())
    def a_human_says_what_is_so(self, data: st.DataObject) -> None:
        rows = self.world.store.rows("SELECT dfid, idempotency_key FROM execution_log WHERE status = 'UNKNOWN'")
        ended = sorted((dfid, key) for dfid, key in rows if self.outside.orders.get(key) in ("settled", "rejected"))
        if ended:
            dfid, key = data.draw(st.sampled_from(ended))
            kernel = self.world.open_kernel(executor=self.outside)
            now_ms = self.world.clock()
            stated = Receipt(self.outside.orders[key], key[:8])
            with suppress(SdsError):  # its lease may not be over
                attest(kernel, dfid, stated, who="ada", reason="asked", acknowledged=True, now_ms=now_ms)

    @invariant()
    def nothing_is_paid_twice_or_freed_too_early(self) -> None:
        store = self.world.store
        paid = [self._event(key) for key, status in self.outside.orders.items() if status in ("settled", "pending")]
        assert len(paid) == len(set(paid)), "an event was paid twice, or may be"
        for key, status in store.rows("SELECT idempotency_key, status FROM execution_log"):
            there = self.outside.orders.get(key, "absent")
            assert status != "SUCCESS" or there == "settled"
            assert status != "FAILED" or there in ("rejected", "absent"), f"freed while it is {there}"
            assert status != "DIRTY", "this outside contradicts itself only about what is in flight"

    @invariant()
    def what_is_unknown_waits_visibly(self) -> None:
        listed = {case.dfid for case in HumanReview(self.world.kernel, now_ms=self.world.clock).waiting()}
        assert set(self.world.column("SELECT dfid FROM execution_log WHERE status = 'UNKNOWN'")) <= listed

    def _event(self, key: str) -> object:
        sql = "SELECT event_id FROM decision_flows WHERE dfid = ?"
        return self.world.store.value(sql, (self.outside.events[key],))

    def _decide(self, store: Store, name: str) -> None:
        kernel = self.world.open_kernel(store, executor=self.outside)
        opened = kernel.open(self.world.event(name, TICKETS[name]))
        if isinstance(opened, DecisionPacket):
            kernel.decide(opened, refund("10.00")(opened), Decoding())

    def _recover(self, store: Store) -> None:
        recover(self.world.open_kernel(store, executor=self.outside), now_ms=self.world.clock())

    def _in_a_process(self, at: int, work: Callable[[Store], None]) -> None:
        """Do it in a process that stops at I/O step `at`; 0: it does not stop."""
        faults = Faults()
        store = opened_store(self.world.path, connect=failing(faults))
        faults.at = len(faults.steps) + at if at else None
        self.outside.faults = faults
        with suppress(SdsError, Crash):
            work(store)
        faults.bury()
        self.outside.faults = Faults()

    def _end(self) -> None:
        """Once the outside has ended everything and says so, recovery learns it all."""
        self.outside.answers = "honest"
        for key, status in self.outside.orders.items():
            self.outside.orders[key] = "settled" if status == "pending" else status
        for _ in range(2):
            self.world.clock.advance(2 * 3_600_000)
            self._recover(self.world.store)
        self.nothing_is_paid_twice_or_freed_too_early()
        rows = self.world.store.rows("SELECT idempotency_key, status FROM execution_log")
        settled = {key for key, status in self.outside.orders.items() if status == "settled"}
        assert settled == {key for key, status in rows if status == "SUCCESS"}, "an effect is lost"
        waits = [key for key, status in rows if status in ("PENDING", "UNKNOWN")]
        assert not [key for key in waits if key in self.outside.orders], "an order has ended, and nobody has learnt it"
        assert () == verify.verify(self.world.store).faults


TestAcceptingHistory = AcceptingHistory.TestCase
TestAcceptingHistory.settings = settings(max_examples=scale(25, 1_000), stateful_step_count=20, deadline=None)

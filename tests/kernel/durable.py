"""A kernel over a real store file, a source over real data, and the rail of `outside`."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from sds.kernel.audit import verify
from sds.kernel.context import rationale
from sds.kernel.context.memory import RecordedContext
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.executor.protocol import Executor
from sds.kernel.flow import intake
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.registry import registry
from sds.kernel.storage.keyring import Keyring, Random, Signer
from sds.kernel.storage.ledger import GENESIS, CheckpointWitness, Head, LedgerKey
from sds.kernel.storage.sqlite import Connect, connect
from sds.kernel.storage.store import Store
from sds.kernel.storage.vault import Texts
from tests.kernel.outside import START_MS, Rail, Tickets
from tests.stores.opened import opened_store

CONTRACT = """
gate: claims
agent_id: claims-agent
version: 1.0.0
owner: desk@example.org
effective_from: "2013-01-01"
source: tickets
mission: Decide claims.
authority: [COMPENSATE, REFUND_TICKET, GOODWILL, DENY]
event: {id: claim_id, key: ticket_id, evidence: text}
snapshot:
  ticket.customer: string
  ticket.refundable_minor: fixed(2)
  ticket.compensations_left: int
  ticket.mood: enum(calm, angry)
kinds:
  COMPENSATE:
    when: ticket.compensations_left > 0
    fills: {amount: {value: 25000, scale: 2}}
    draws: {ticket.compensations_left: 1}
    spends: amount
    reasons: [LONG_DELAY]
  REFUND_TICKET:
    when: ticket.refundable_minor > 0
    params: {amount: {lo: 1, hi: ticket.refundable_minor, scale: 2}}
    draws: {ticket.refundable_minor: amount}
    spends: amount
    reasons: [NOT_TRAVELLED]
  GOODWILL:
    when: ticket.mood == "angry"
    params: {amount: {lo: 0, hi: 1000, scale: 2}}
    spends: amount
    reasons: [SHORT_DELAY]
  DENY: {reasons: [NOT_ELIGIBLE]}
spend:
  - {name: hour, window: hour, max_minor: 5000000}
  - {name: day, window: day, max_minor: 10000000}
  - {name: customer, window: day, per: ticket.customer, max_minor: 100000}
retry: {attempts_max: 3, restarts_max: 3, rejections_to_suspend: 10}
budget: {ttl_ms: 30000, dispatch_ms_max: 5000}
escalation: {per_hour: 1000000}
"""
COMPENSATION_MINOR = 25_000
LEASE_MS = 36_000
KEY = b"the kernel's own key, 32 bytes.."
SIGNER = Signer(KEY)
SEED = b"the ledger's own key, 32 bytes.."
PUBLIC = LedgerKey(SEED, Head(0, GENESIS)).public
TRIES_MAX = 20_000

Propose = Callable[[DecisionPacket], bytes]
AnyWorld = TypeVar("AnyWorld", bound="World")


def contract(*changes: tuple[str, str], more: str = "") -> Contract:
    """Return the test contract with (old, new) texts exchanged and `more` at its end."""
    whole = CONTRACT + more
    for old, new in changes:
        if old not in whole:
            raise ValueError(f"`{old}` is not in the contract")
        whole = whole.replace(old, new)
    return parse_contract(whole)


@cache
def usual_contract() -> Contract:
    """Return the test contract as it is, read once: it is frozen, and reading it takes longer than most tests."""
    return contract()


class Clock:
    """Milliseconds since 1970; stands still unless told otherwise."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms


def witness() -> CheckpointWitness:
    """Sign the ledger as `sds.host.paths` has it done: the key is there, whoever opens the store."""
    return CheckpointWitness(lambda _: LedgerKey(SEED, PUBLIC.since), Clock())


class World:
    """One folder with the kernel's file and the rail's, and everything else a kernel is given.

    `random=bytes` gives zeros: what is sealed is the same each time, for tests that compare whole records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        terms: Contract | None = None,
        idempotent: bool = True,
        random: Random = secrets.token_bytes,
        now_ms: int = START_MS,
    ) -> None:
        self.folder, self.contract = folder, terms or usual_contract()
        self._random = random
        self.clock = Clock(now_ms)
        self.tickets = Tickets()
        self.rail = Rail(folder / "rail.db", idempotent=idempotent)
        self.logged: list[tuple[str, object]] = []
        self._numbers = itertools.count(1)
        self._open: list[Store] = []
        self.tickets.put("T1")
        self.store = self.open_store()
        registry.register(self.store, self.contract, by="registry", now_ms=self.clock())
        self.kernel = self.open_kernel()

    @property
    def path(self) -> Path:
        return self.folder / "kernel.db"

    def open_store(self, how: Connect = connect) -> Store:
        store = opened_store(self.path, connect=how, witness=witness())
        store.unlock(Keyring(SIGNER, random=self._random))
        self._open.append(store)
        return store

    def open_kernel(
        self,
        store: Store | None = None,
        *,
        terms: Contract | None = None,
        executor: Executor | None = None,
        log: Log | None = None,
    ) -> Kernel:
        store = store or self.store
        store.unlock(Keyring(SIGNER, random=self._random))
        return Kernel(
            terms or self.contract,
            store,
            self.tickets,
            executor or self.rail,
            SIGNER,
            now_ms=self.clock,
            log=log or (lambda event, facts: self.logged.append((event, facts))),
            context=RecordedContext(store, terms or self.contract),
        )

    def close(self) -> None:
        for store in self._open:
            store.close()

    def event(self, name: str = "C1", ticket: str = "T1", text: str = "please") -> intake.Event:
        return intake.read_event(self.contract, {"claim_id": name, "ticket_id": ticket, "text": text})

    def packet(self, name: str = "C1", ticket: str = "T1") -> DecisionPacket:
        opened = self.kernel.open(self.event(name, ticket))
        assert isinstance(opened, DecisionPacket)
        return opened

    def decide(self, propose: Propose, name: str = "C1", ticket: str = "T1", **measured: float) -> Answer:
        """Open an event that nobody has claimed, and decide it."""
        packet = self.packet(name, ticket)
        return self.kernel.decide(packet, propose(packet), Decoding(**measured))  # type: ignore[arg-type]  # by name

    def prompt(self, dfid: object) -> tuple[str, ...]:
        """Return what the model read for a flow's last attempt, as the record has it."""
        (stored,) = self.column("SELECT prompt FROM context_snapshots WHERE dfid = ?", dfid)
        return Texts(self.store, str(dfid)).prompt(str(stored))

    def explain(self, dfid: str, text: str, kernel: Kernel | None = None) -> None:
        """Record why a flow was decided as it was."""
        kernel = kernel or self.kernel
        rationale.explain(kernel.store, kernel.contract, dfid, text, now_ms=self.clock())

    def column(self, sql: str, *values: object) -> list[object]:
        return [row[0] for row in self.store.rows(sql, values)]


@contextmanager
def whole(world: AnyWorld) -> Iterator[AnyWorld]:
    """Close a world at the end, and check before that its record is whole."""
    with closing(world):
        yield world
        assert () == verify.verify(world.store).faults


def proposal(kind: str, reason: str, **params: str) -> Propose:
    return lambda packet: write_proposal(Proposal(kind, tuple(params.items()), reason, packet.snapshot.id))


def refund(amount: str = "40.00") -> Propose:
    return proposal("REFUND_TICKET", "NOT_TRAVELLED", amount=amount)


def goodwill(amount: str) -> Propose:
    return proposal("GOODWILL", "SHORT_DELAY", amount=amount)


def compensate(packet: DecisionPacket) -> bytes:
    return proposal("COMPENSATE", "LONG_DELAY")(packet)


def deny(packet: DecisionPacket) -> bytes:
    return proposal("DENY", "NOT_ELIGIBLE")(packet)


def escalate(packet: DecisionPacket) -> bytes:
    return proposal("ESCALATE", "HUMAN_REVIEW")(packet)


def anything_else(packet: DecisionPacket) -> bytes:
    return (deny if packet.envelope.kind("DENY") else escalate)(packet)


def nonsense(_packet: DecisionPacket) -> bytes:
    return b'{"action":"REFUND_TICKET","params":{"amount":1e400}'


def if_permitted(wanted: Propose, kind: str) -> Propose:
    """Propose what is wanted while the envelope has its kind, then what is left: no, or a human."""
    return lambda packet: (wanted if packet.envelope.kind(kind) else anything_else)(packet)


def see_through(kernel: Kernel, event: intake.Event, propose: Propose) -> Answer:
    """Bring one event to its end, as every caller does: wait while another works on it, start anew after drift.

    Not after an order that nobody knows the end of: what waits for that is returned.
    """
    for _ in range(TRIES_MAX):
        opened = kernel.open(event)
        if isinstance(opened, DecisionPacket):
            while (answer := kernel.decide(opened, propose(opened))).state == "ACTIVE":
                pass
            if answer.tag == "EXECUTOR_DOWN" or (answer.retryable and kernel.holder(event.key) == "UNKNOWN"):
                return answer
        elif not opened.pending:
            return opened
        else:
            time.sleep(0.001)
    raise AssertionError(f"event {event.id} has no end")


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """Do `work(0)` ... `work(count - 1)` at the same time; raise the first failure."""
    start = threading.Barrier(count)
    results: list[object] = [None] * count

    def one(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def counters(store: Store) -> Iterator[tuple[str, int]]:
    yield from store.rows("SELECT resource, drawn FROM resources ORDER BY resource")
    yield from store.rows("SELECT scope, used FROM spend_totals ORDER BY scope")

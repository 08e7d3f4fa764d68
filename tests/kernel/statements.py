"""A rail that lists what it was ordered, honestly or not, and a record that is put back from a backup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from sds.gates.refund.rail.store import Line, Order, PayoutStore
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.statement import Comparison, StatementLine
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import Case, waiting
from sds.kernel.registry import registry
from sds.reconciliation import adopt, reconcile
from tests.kernel.durable import START_MS, Propose, Rail, World, compensate, goodwill, refund, see_through
from tests.kernel.faults import Faults
from tests.stores.records import Kept, kept, put_back, remove

CASES: tuple[Propose, ...] = (refund("40.00"), compensate, goodwill("3.00"), refund("7.25"))
Told = Callable[[StatementLine], StatementLine]


def cases(world: World) -> list[Case]:
    return waiting(world.store, world.contract)


class ListingRail(Rail):
    """A rail that also lists. `tells` makes of each line what it says; `while_listing` is what happens meanwhile."""

    def __init__(self, path: Path, *, faults: Faults | None = None) -> None:
        super().__init__(path, faults=faults)
        self.tells: Told = lambda line: line
        self.while_listing: Callable[[], object] = lambda: None
        self.listed = 0

    def statement(self, since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        self.listed += 1
        after = 0
        while page := self._memory.statement(since_ms, until_ms, after):
            yield from (self.tells(_line(line)) for line in page)
            after = page[-1].number
        self.while_listing()


def _line(line: Line) -> StatementLine:
    return StatementLine(
        line.key,
        line.status,  # type: ignore[arg-type]  # settled, rejected or reverted
        line.at_ms,
        line.amount_minor,
        line.reference,
        line.dfid,
        line.kind,
        {"amount": line.amount_minor},
        line.ticket_id,
    )


def forgetful(line: StatementLine) -> StatementLine:
    """Keep of an order only what a bank statement has."""
    return StatementLine(line.key, line.outcome, line.at_ms, line.amount_minor, line.reference)


class Liar(ListingRail):
    """A rail whose receipts say `says`, whatever it does: it pays all the same, `amount` where one is given, or nothing."""

    def __init__(self, path: Path, says: Receipt, *, pays: bool = True, amount: int | None = None) -> None:
        super().__init__(path)
        self.says, self.pays, self.amount = says, pays, amount

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if self.pays:
            params = intent.params if self.amount is None else (("amount", self.amount),)
            super().dispatch(replace(intent, params=params), key, deadline_s)
        return self.says

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self.says


def listing(world: World, rail: ListingRail | None = None) -> ListingRail:
    """Give a world a rail that lists, and a kernel that orders there."""
    made = rail or ListingRail(world.folder / "rail.db")
    world.rail = made
    world.kernel = world.open_kernel()
    return made


def compared(world: World, *, since_ms: int = 0, until_ms: int | None = None) -> Comparison:
    return reconcile(world.kernel, since_ms=since_ms, until_ms=until_ms, now_ms=world.clock)


def codes(world: World) -> list[str]:
    return [difference.code for difference in compared(world).differences]


def backup(world: World) -> Kept:
    """Return the record as it is now."""
    return kept(world.path)


def restore(world: World, data: Kept | None) -> None:
    """Put a record back, or begin a fresh one where there is none, and open it."""
    world.close()
    remove(world.path)
    if data is not None:
        put_back(world.path, data)
    world.store = world.open_store()
    registry.register(world.store, world.contract, by="registry", now_ms=world.clock())
    world.kernel = world.open_kernel()


def paid_elsewhere(folder: Path, key: str, amount: int) -> None:
    """Have somebody else order at the rail."""
    PayoutStore(folder / "rail.db", lambda: START_MS).pay(Order(key, "GOODWILL", amount, "T1", "somebody-else"))


def decided(world: World, number: int, propose: Propose | None = None) -> Answer:
    """Bring one event to its end, decided as it is decided whenever it comes."""
    propose = propose or CASES[number % len(CASES)]
    return see_through(world.kernel, world.event(f"C{number}", f"T{number}"), propose)


def adopted(world: World) -> tuple[str, ...]:
    return adopt(world.kernel, who="ada", reason="the disk was lost", now_ms=world.clock)

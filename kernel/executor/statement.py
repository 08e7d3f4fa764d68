"""What the outside says it did, compared with what the record says was ordered: every difference, and nothing is changed.

The record is read first, then the statement, then the record again. An order is durable before it is sent, so the record
has all that the statement has by then; and what the record called settled before must be in the statement.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sds.kernel.canonical import canonical, in_words, one_line
from sds.kernel.envelope.envelope import MAGNITUDE_MAX
from sds.kernel.errors import SdsError, WorldError
from sds.kernel.storage.store import Reader

Outcome = Literal["settled", "rejected", "reverted", "pending"]

Statement = Callable[[int, int], tuple["StatementLine", ...]]  # (since_ms, until_ms) -> what an executor lists

STATEMENT_S_MAX = 60.0
LINES_MAX = 1_000_000
TEXT_CHARS_MAX = 200
AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999
NUMBERS_MAX = 32
CLOCKS_APART_MS = 24 * 3_600_000  # how far the outside's clock may differ; a statement reaches this far beyond a period
KEYS_AT_ONCE = 500
_MOVED: tuple[Outcome, ...] = ("rejected", "reverted", "pending", "settled")  # the later, the more may have moved

_ORDERS = """
SELECT e.dfid, f.event_id, e.idempotency_key, e.kind, e.params, e.resource_key, e.status, e.reserved_at_ms,
       e.executed_at_ms, r.status, CAST(json_extract(l.body, '$.needs[1]') AS BIGINT)
FROM execution_log e JOIN decision_flows f ON f.dfid = e.dfid LEFT JOIN saga_reversals r ON r.dfid = e.dfid
LEFT JOIN ledger l ON l.dfid = e.dfid AND l.kind IN ('RESERVED', 'ADOPTED') WHERE f.gate = ?
"""


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One order as the outside has it. `reverted`: it was settled, and undone completely. `pending`: it was accepted, and is
    none of the others yet. `at_ms`: the time of the answer there.

    `amount_minor`: the money that moved. The rest is what the order carried, if the outside keeps it: a record that lost
    the order needs `dfid` to recognise its event, and the others to count what was drawn. `other_currency`: the currency
    in which it moved, where that is not the one in which it was ordered.
    """

    key: str
    outcome: Outcome
    at_ms: int
    amount_minor: int | None = None
    reference: str = ""
    dfid: str = ""
    kind: str = ""
    params: Mapping[str, int] = field(default_factory=dict)
    resource_key: str = ""
    other_currency: str = ""

    def as_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"params": dict(self.params)}


def read_statement(
    listing: Callable[[int, int], Iterable[object]], since_ms: int, until_ms: int
) -> tuple[StatementLine, ...]:
    """Read a whole statement. Raises WorldError with STATEMENT_UNREADABLE, whatever else the executor raises or returns."""
    lines: list[StatementLine] = []
    ends_s = time.monotonic() + STATEMENT_S_MAX  # the caller has given up by then, and reading must end, too
    try:
        for line in listing(since_ms, until_ms):
            lines.append(_checked(line))
            if time.monotonic() > ends_s:
                raise unreadable_statement(f"it did not arrive within {STATEMENT_S_MAX:.0f} s")
            if len(lines) > LINES_MAX:
                raise unreadable_statement(f"it has more than {LINES_MAX} lines", hint="ask for a shorter period")
    except SdsError as error:
        if error.reason_code == "STATEMENT_UNREADABLE":
            raise
        raise unreadable_statement(str(error), hint=error.hint) from error
    except Exception as error:
        raise unreadable_statement(f"{type(error).__name__}: {in_words(error)}") from error
    return tuple(lines)


def unreadable_statement(why: str, *, hint: str = "") -> WorldError:
    """Return the error for a statement that cannot be had or read."""
    message = one_line(f"the executor's statement cannot be read: {why}", TEXT_CHARS_MAX)
    return WorldError(message, reason_code="STATEMENT_UNREADABLE", hint=hint)


def _checked(line: object) -> StatementLine:
    """Return a line if the record can keep it; an executor is foreign code. Raises WorldError."""
    if not isinstance(line, StatementLine):
        raise unreadable_statement("an entry in it is not a StatementLine")
    texts = (line.key, line.reference, line.dfid, line.kind, line.resource_key, line.other_currency)
    if not all(isinstance(text, str) and len(text) <= TEXT_CHARS_MAX and text.isprintable() for text in texts):
        raise unreadable_statement("an entry has a text that is missing, not printable or too long")
    if not line.key or line.outcome not in get_args(Outcome):
        raise unreadable_statement(f"key `{line.key}` is empty, or its outcome is unknown: `{line.outcome}`")
    params = line.params
    if not isinstance(params, Mapping) or len(params) > NUMBERS_MAX or not all(isinstance(n, str) for n in params):
        raise unreadable_statement(f"the params of key `{line.key}` are not {NUMBERS_MAX} or fewer named numbers")
    amounts = () if line.amount_minor is None else (line.amount_minor,)
    if not all(_is_whole_number(number) for number in (line.at_ms, *amounts, *params.values())):
        raise unreadable_statement(f"a number of key `{line.key}` is not a whole number, or too large for the record")
    if not 0 <= line.at_ms <= AT_MS_MAX:
        raise unreadable_statement(f"the time of key `{line.key}` is out of range: {line.at_ms} ms")
    kept = canonical(line.as_data())  # raises for lone surrogates, which a parameter's name may contain
    return StatementLine(**json.loads(kept))  # texts and no subclasses of them: see `read_event`


def _is_whole_number(number: object) -> bool:
    return type(number) is int and -MAGNITUDE_MAX <= number <= MAGNITUDE_MAX


@dataclass(frozen=True, slots=True)
class Order:
    """One order as the record has it. `spends`: what counts against spend limits, in minor units; 0: nothing."""

    dfid: str
    event_id: str
    key: str
    kind: str
    params: Mapping[str, int]
    resource_key: str
    status: str
    reserved_at_ms: int
    executed_at_ms: int | None
    reversal: str | None
    spends: int

    @property
    def in_flight(self) -> bool:
        """Whether its outcome is not known yet: recovery finds that out."""
        return self.status in ("PENDING", "UNKNOWN") or self.reversal in ("PENDING", "UNKNOWN")

    @property
    def words(self) -> str:
        undone = f", {self.reversal.lower()}" if self.reversal else ""
        return f"{self.status}{undone}: {_order_words(self.kind, self.params, self.resource_key)}"

    def moved(self, amount_minor: int) -> bool:
        """Tell whether this is what it was to move: what it spends, else one of its amounts, or 0 when it has none."""
        if self.spends:
            return amount_minor == self.spends
        return amount_minor in self.params.values() if self.params else amount_minor == 0


def _order_words(kind: str, params: Mapping[str, int], resource_key: str) -> str:
    amounts = "".join(f" {name} {number}" for name, number in sorted(params.items()))
    return f"{kind or 'an order'}{amounts}{f' on {resource_key}' if resource_key else ''}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between record and outside about one key. `here` and `outside`: what each says, in words.

    `dfid`: the flow that ordered it, "" when that is not known. `line`: the outside's order, None when it has none.
    """

    code: str
    key: str
    dfid: str
    resource_key: str
    here: str
    outside: str
    line: StatementLine | None = None

    @property
    def words(self) -> str:
        return f"{self.code}: key {self.key[:12]}: record: {self.here}; outside: {self.outside}"

    def as_data(self) -> dict[str, str]:
        """Return what identifies this difference for ever: it has no time and no reference."""
        names = ("code", "key", "dfid", "resource_key", "here", "outside")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison. `in_flight`: how many orders and reversals recovery must find the end of first."""

    differences: tuple[Difference, ...]
    orders: int
    lines: int
    in_flight: int


def compare(record: Reader, gate: str, statement: Statement, *, since_ms: int, until_ms: int) -> Comparison:
    """Compare what was reserved in a period with what the outside lists of it. Changes nothing.

    At the ends of the period the record's times decide: an order that was reserved before it or settled after it is no
    difference. Raises WorldError when the statement cannot be read.
    """
    orders = read_orders(record, gate, since_ms, until_ms)
    lines = statement(max(0, since_ms - CLOCKS_APART_MS), until_ms + CLOCKS_APART_MS)
    listed: defaultdict[str, list[StatementLine]] = defaultdict(list)
    for line in lines:
        listed[line.key].append(line)
    known = known_keys(record, listed)
    unknown = [those for key, those in listed.items() if key not in known]
    found = [_unknown(those) for those in unknown if any(since_ms <= line.at_ms <= until_ms for line in those)]
    judged = [order for order in orders if not order.in_flight]
    found += [made for order in judged if (made := _judge(order, listed.get(order.key, ()), until_ms))]
    found += _paid_again(judged, listed, {difference.key for difference in found})
    return Comparison(_unchanged(record, gate, found, orders), len(orders), len(lines), len(orders) - len(judged))


def read_orders(record: Reader, gate: str, since_ms: int, until_ms: int) -> list[Order]:
    """Return a gate's orders that were reserved in a period, oldest first."""
    sql = f"{_ORDERS} AND e.reserved_at_ms BETWEEN ? AND ? ORDER BY e.reserved_at_ms, e.dfid"
    return [_order(row) for row in record.rows(sql, (gate, since_ms, until_ms))]


def _order(row: tuple[Any, ...]) -> Order:
    dfid, event_id, key, kind, params, resource_key, status, reserved_at_ms, executed_at_ms, reversal, spends = row
    try:
        amounts = dict(json.loads(params))
    except (TypeError, ValueError, RecursionError):  # altered beyond reading, so that it differs from the outside's
        amounts = {}
    times = reserved_at_ms, executed_at_ms
    return Order(dfid, event_id, key, kind, amounts, resource_key, status, *times, reversal, int(spends or 0))


def known_keys(record: Reader, keys: Iterable[str]) -> set[str]:
    """Return which of these keys have an order in the record, of any gate."""
    wanted, known = list(keys), set[str]()
    for start in range(0, len(wanted), KEYS_AT_ONCE):
        some = tuple(wanted[start : start + KEYS_AT_ONCE])
        marks = ", ".join("?" * len(some))
        sql = f"SELECT idempotency_key FROM execution_log WHERE idempotency_key IN ({marks})"
        known.update(row[0] for row in record.rows(sql, some))
    return known


def _unknown(lines: list[StatementLine]) -> Difference:
    """Return the difference of an order that the record does not know. Of several lines under its key the one by which most
    has moved stands for it: taken over as refused, its event would be paid again.
    """
    line = max(lines, key=lambda line: (_MOVED.index(line.outcome), line.amount_minor or 0))
    return Difference("ORDER_UNKNOWN", line.key, line.dfid, line.resource_key, "no such order", _outside(lines), line)


def _outside(lines: Iterable[StatementLine]) -> str:
    return "; ".join(_line_words(line) for line in lines) or "nothing"


def _line_words(line: StatementLine) -> str:
    amount = "" if line.amount_minor is None else f" {line.amount_minor}"
    currency = f" {line.other_currency}, another currency" if line.other_currency else ""
    return f"{line.outcome}{amount}{currency}: {_order_words(line.kind, line.params, line.resource_key)}"


def _judge(order: Order, lines: Iterable[StatementLine], until_ms: int) -> Difference | None:
    """Return the first difference between one order and its lines; None: they agree."""
    lines = tuple(lines)
    code = _at_odds(order, lines, until_ms)
    if code is None:
        return None
    line = lines[0] if lines else None
    here, outside = order.words, _outside(lines)
    if code == "ORDER_DIFFERS" and line is not None and line.dfid not in ("", order.dfid):
        here, outside = f"{here}, for flow {order.dfid}", f"{outside}, for flow {line.dfid}"
    return Difference(code, order.key, order.dfid, order.resource_key, here, outside, line)


def _at_odds(order: Order, lines: tuple[StatementLine, ...], until_ms: int) -> str | None:
    """Return the code of the first difference between an order and its lines; None: they agree."""
    if not lines:
        in_time = order.executed_at_ms is not None and order.executed_at_ms <= until_ms
        return "NOT_CARRIED_OUT" if order.status == "SUCCESS" and in_time else None
    if len(lines) > 1:
        return "CARRIED_OUT_TWICE"
    (line,) = lines
    return _compare_end(order, line.outcome) or _compare_order(order, line)


def _compare_end(order: Order, outcome: str) -> str | None:
    """Compare how an order ended. DIRTY is known as a contradiction already. An order undone completely counts as never
    carried out: when a refused order was paid and taken back, nothing moved.
    """
    if outcome == "pending":
        return None if order.status == "DIRTY" else "PENDING_OUTSIDE"
    if order.status == "FAILED":
        return "CARRIED_OUT_OUTSIDE" if outcome == "settled" else None
    if order.status == "DIRTY":
        return None
    if outcome == "rejected":
        return "REJECTED_OUTSIDE"
    if (outcome == "reverted") == (order.reversal == "REVERTED"):
        return None
    return "REVERSED_OUTSIDE" if outcome == "reverted" else "NOT_REVERSED"


def _compare_order(order: Order, line: StatementLine) -> str | None:
    """Compare what was ordered, as far as the outside says it."""
    moved = line.amount_minor is None or order.moved(line.amount_minor)
    stood = (
        line.outcome in ("settled", "reverted") and order.status != "FAILED"
    )  # of a failed one what moved was taken back
    if stood and (line.other_currency or not moved):
        return "AMOUNT_DIFFERS"
    there = (line.dfid, line.kind, dict(line.params), line.resource_key)
    here = (order.dfid, order.kind, dict(order.params), order.resource_key)
    return "ORDER_DIFFERS" if any(a and a != b for a, b in zip(there, here, strict=True)) else None


def _paid_again(
    orders: Iterable[Order], listed: Mapping[str, list[StatementLine]], reported: set[str]
) -> Iterable[Difference]:
    """Yield a difference for every further order that stands for an event of which one order stands already."""
    first: dict[str, Order] = {}
    for order in orders:
        stands = [line for line in listed.get(order.key, ()) if line.outcome == "settled"]
        if not stands or first.setdefault(order.event_id, order) is order or order.key in reported:
            continue
        here = f"{order.words}, after {first[order.event_id].words} of the same event"
        yield Difference(
            "EVENT_CARRIED_OUT_TWICE", order.key, order.dfid, order.resource_key, here, _outside(stands), stands[0]
        )


def _unchanged(record: Reader, gate: str, found: list[Difference], before: list[Order]) -> tuple[Difference, ...]:
    """Leave out differences whose order has changed meanwhile, say by a reversal: the next comparison sees it whole."""
    then = {order.key: order for order in before}

    def stands(difference: Difference) -> bool:
        was = then.get(difference.key)
        now = record.row(f"{_ORDERS} AND e.idempotency_key = ?", (gate, difference.key)) if was else None
        return was is None or (now is not None and _order(now) == was)

    return tuple(filter(stands, found))

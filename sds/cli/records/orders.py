"""`sds orders`: what was ordered and paid in a period, by whom, and whether the executor's statement agrees."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import tzinfo
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer

from sds.cli.common import ChosenGate, JsonFlag, as_name, open_store
from sds.cli.records.reconcile import moment
from sds.cli.render import counted, echo, plain, print_either
from sds.gates.opening import recovery_kernel
from sds.host.clock import now_ms
from sds.host.paths import gate_home
from sds.kernel.audit.orders import BookedOrder, local_time, orders, with_statement
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS

BY = ("day", "month", "status", "kind", "account", "agent", "contract", "decision", "decided_by")
# What a spreadsheet takes for the beginning of a formula: in full width, too, and after `;`, which begins a cell in many countries
_FORMULA = re.compile("(^|;)(?=[-=+@\t\r\uff1d\uff0b\uff0d\uff20])")


def list_orders(
    gate: ChosenGate,
    since: Annotated[str | None, typer.Option("--since", metavar="ISO", help="The start, in ISO 8601.")] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="ISO", help="The end, which does not belong to it. Default: now.")
    ] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", help="The time zone of days, of printed times, and of times without an offset.")
    ] = "UTC",
    by: Annotated[
        str, typer.Option("--by", help=f"Print totals by these instead, as in day,kind: {', '.join(BY)}.")
    ] = "",
    statement: Annotated[
        bool,
        typer.Option("--statement", help="Set the executor's own list beside the record. Exit code 1: they differ."),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the orders of a period: amount, time, who decided it, and what became of it. It changes nothing.

    An order belongs to the time at which its end was recorded, or with --statement to the executor's own time.

    Example: sds orders refund --since 2026-10-01 --until 2026-11-01 --timezone Europe/Berlin --csv
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json exclude each other", hint="leave one of them out")
    zone, groups = _zone(timezone), _groups(by)
    found = _found(gate, _period(since, until, zone), statement=statement)
    data = _totals(found, groups, zone, statement) if groups else [_data(order, zone, statement) for order in found]
    if as_csv:
        echo(_csv(data), nl=False)
    else:
        print_either(as_json, data, (_line(each) for each in data), none="no orders")
    if statement and (differing := [order for order in found if not order.agrees]):
        raise WorldError(
            f"{counted(len(differing), 'order')} differ between record and statement", hint="sds reconcile GATE"
        )


def _period(since: str | None, until: str | None, zone: tzinfo) -> tuple[int, int]:
    """Return the first and the last millisecond of a period."""
    start, end = moment(since, 0, zone), moment(until, now_ms() + CLOCKS_APART_MS, zone) - 1
    if end < start:
        raise UsageError("--until is not after --since", hint="swap the two times")
    return start, end


def _found(gate: ChosenGate, period: tuple[int, int], *, statement: bool) -> list[BookedOrder]:
    if not statement:  # reads the record alone, without the gate's code
        name = as_name(gate.given)
        with closing(open_store(name)) as store:
            return orders(store, name, *period)
    definition, (start, end) = gate.find(), period
    open_store(definition.name).close()
    with recovery_kernel(definition, gate_home(definition.name)) as kernel:
        lists = kernel.dispatcher.statement
        return with_statement(kernel.store, definition.name, lists, since_ms=start, until_ms=end)


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"there is no time zone `{name[:64]}`", hint="a name such as Europe/Berlin") from error


def _groups(by: str) -> tuple[str, ...]:
    names = tuple(name for name in by.split(",") if name)
    if unknown := [name for name in names if name not in BY]:
        raise UsageError(f"there are no totals by `{unknown[0][:40]}`", hint=", ".join(BY))
    return names


def _data(order: BookedOrder, zone: tzinfo, statement: bool) -> dict[str, Any]:
    line, data = order.line, order.as_data(zone)
    if statement:
        currency = line.other_currency if line else ""
        moved = line.amount_minor if line else None
        amount = None if moved is None else f"{moved} {currency}" if currency else format_literal(moved, order.decimals)
        data |= {"outside": line.outcome if line else "", "outside_amount": amount, "agrees": order.agrees}
    return data


def _totals(found: Iterable[BookedOrder], by: Sequence[str], zone: tzinfo, statement: bool) -> list[dict[str, Any]]:
    """Return one row for each group: how many orders, and what of them was paid, is open, and was taken back."""
    groups: dict[tuple[Any, ...], list[BookedOrder]] = {}
    for order in found:
        groups.setdefault((*(_of(order, name, zone) for name in by), order.decimals), []).append(order)
    return [
        {**dict(zip(by, values, strict=False)), **_sums(groups[values], values[-1], statement)}
        for values in sorted(groups, key=str)
    ]


def _sums(members: Sequence[BookedOrder], decimals: int, statement: bool) -> dict[str, Any]:
    def total(*statuses: str) -> str:
        return format_literal(sum(each.amount_minor or 0 for each in members if each.status in statuses), decimals)

    sums = {
        "orders": len(members),
        "paid": total("PAID"),
        "taken_back": total("TAKEN_BACK"),
        "open": total("OPEN", "CONTRADICTED"),
    }
    outside = {"outside": format_literal(sum(each.outside_minor for each in members), decimals)}
    return sums | outside | {"differing": sum(not each.agrees for each in members)} if statement else sums


def _of(order: BookedOrder, name: str, zone: tzinfo) -> str:
    at = local_time(order.at_ms, zone)
    values: Mapping[str, str] = {
        "day": at[:10],
        "month": at[:7],
        "status": order.status,
        "kind": order.kind,
        "account": order.resource_key,
        "agent": order.agent_id,
        "contract": order.contract_version,
        "decision": order.decision,
        "decided_by": order.decided_by,
    }
    return values[name]


def _line(row: Mapping[str, Any]) -> str:
    left_out = ("ordered_at", "agent", "contract", "key", "reason", "event_id")
    shown = {name: value for name, value in row.items() if name not in left_out and value not in ("", None)}
    return "  ".join(
        plain(value) if name in ("at", "status", "amount", "kind") else f"{name}={plain(value)}"
        for name, value in shown.items()
    )


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV (RFC 4180). A text that a spreadsheet would take for a formula gets a `'` in front: ids are a caller's words."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    return _FORMULA.sub(r"\1'", "" if value is None else plain(value))

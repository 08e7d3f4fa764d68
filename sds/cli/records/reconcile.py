"""`sds reconcile`: compare the executor's own list with the orders in the record."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Annotated, Any

import typer

from sds.cli.common import ChosenGate, JsonFlag, as_words, open_store, operator
from sds.cli.render import counted, print_either
from sds.gates.opening import recovery_kernel
from sds.host.clock import now_ms
from sds.host.paths import gate_home
from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.statement import Comparison


def reconcile(
    gate: ChosenGate,
    since: Annotated[
        str | None, typer.Option("--since", metavar="ISO", help="The start, in ISO 8601. UTC if it has no offset.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="ISO", help="The end. Default: now.")] = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over the orders that the record lacks, as after a restore.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", help="The reason for --adopt, kept in the record.", callback=as_words)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare the record with the executor's list. It compares order by order. Exit code 1: they differ.

    Each difference becomes a case for a human (`sds escalations list`). Only --adopt changes anything else.

    Example: sds reconcile refund --since 2026-01-01
    """
    if adopt != (reason is not None):
        raise UsageError("--adopt and --reason go together", hint='sds reconcile GATE --adopt --reason "..."')
    period = {"since_ms": moment(since, 0), "until_ms": moment(until, None)}
    if period["until_ms"] is not None and period["until_ms"] < period["since_ms"]:
        raise UsageError(f"--until `{until}` is before --since `{since}`", hint="swap the two times")
    definition = gate.find()
    open_store(definition.name).close()
    from sds import reconciliation  # noqa: PLC0415

    with recovery_kernel(definition, gate_home(definition.name)) as kernel:
        adopted: tuple[str, ...] = ()
        if reason is not None:
            adopted = reconciliation.adopt(kernel, **period, who=operator(), reason=reason, now_ms=now_ms)
        compared = reconciliation.reconcile(kernel, **period, now_ms=now_ms, log=kernel.log)
    counts = {"orders": compared.orders, "lines": compared.lines, "in_the_air": compared.in_flight, "adopted": adopted}
    data = {**counts, "differences": [difference.as_data() for difference in compared.differences]}
    print_either(as_json, data, _lines(compared, adopted))
    if compared.differences:
        apart = counted(len(compared.differences), "difference")
        raise WorldError(f"{apart} between record and statement", hint=f"sds escalations list{definition.option}")


def moment(given: str | None, otherwise: Any, zone: tzinfo = UTC) -> Any:
    """Return an ISO 8601 time in milliseconds since 1970; `otherwise` where none is given. `zone`: of a time without an
    offset. Raises UsageError.
    """
    if given is None:
        return otherwise
    try:
        at = datetime.fromisoformat(given)
    except ValueError as error:
        raise UsageError(f"`{given}` is not an ISO 8601 time", hint="as in 2026-01-31 or 2026-01-31T14:00") from error
    return max(0, int(at.replace(tzinfo=at.tzinfo or zone).timestamp() * 1000))


def _lines(compared: Comparison, adopted: tuple[str, ...]) -> Iterator[str]:
    if adopted:
        yield f"adopted: {counted(len(adopted), 'order')}"
    yield from (difference.words for difference in compared.differences)
    yield (
        f"{counted(compared.orders, 'order')} in the record, {compared.lines} in the statement, {compared.in_flight} in flight:"
        f" {counted(len(compared.differences), 'difference')}"
    )

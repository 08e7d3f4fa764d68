"""`sds erase` and `sds erasures`: destroy the keys that encrypt the texts of cases, and list what was erased."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, open_store, operator
from sds.cli.many import IdsFile, Report, for_each, ids_of
from sds.cli.render import counted, echo, plain, print_either
from sds.host.clock import now_ms, when
from sds.kernel.errors import ErasedError
from sds.kernel.operations import erasure
from sds.kernel.operations.erasure import Erased
from sds.kernel.storage.store import Store


def erase(
    reason: Reason,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="ID", help="The id of the event; may be repeated.", show_default=False),
    ] = None,
    file: IdsFile = None,
    gate: GateOption = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Erase the texts of a case for good. These are evidence, prompts, proposals, rationales. What was decided and paid stays.

    End the case first if it is open, waits for a human or has an order in flight. Of several cases each is erased by itself
    and has a line of its own.

    Example: sds erase --event C-00017 --reason "the customer asked for it"
    """
    events = ids_of(event, file, "--event ID")
    with closing(open_store(gate)) as store:
        if file is None and len(events) == 1:
            done = erasure.erase(store, gate, events[0], who=operator(), reason=reason, now_ms=now_ms())
            print_either(
                as_json, asdict(done), [*_lines(events[0], done), *(() if done.overwritten else (store.remains,))]
            )
        else:
            _erase_all(store, gate, events, reason, as_json=as_json)


def _erase_all(store: Store, gate: str, events: list[str], reason: str, *, as_json: bool) -> None:
    """Erase cases one by one; overwrite their keys after the last, since others wait for that to end."""
    try:
        for_each(events, lambda each: _erased(store, gate, each, reason), as_json=as_json)
    finally:
        if not erasure.overwrite(store):
            echo(store.remains, err=True)


def _erased(store: Store, gate: str, event: str, reason: str) -> Report:
    """Erase one case of several. One that was erased before, as by a call that was stopped, is no failure."""
    try:
        done = erasure.destroy(store, gate, event, who=operator(), reason=reason, now_ms=now_ms())
    except ErasedError as error:
        return {"event_id": event, "already": True}, f"{event}: nothing to do: {error}"
    facts = {name: value for name, value in asdict(done).items() if name != "overwritten"}
    return {"event_id": event, "already": False, **facts}, "; ".join(_lines(event, done))


def _lines(event: str, done: Erased) -> Iterator[str]:
    steps = f", and of {counted(len(done.events) - 1, 'step')} of its saga" if len(done.events) > 1 else ""
    yield f"{event}: the texts are erased{steps}"
    if done.in_clear:
        yield f"an older version wrote the texts of these flows unencrypted, so they were not erased: {', '.join(done.in_clear)}"


def erasures(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List the cases whose texts were erased. Oldest first, each with time, event, who and reason.

    Example: sds erasures --json
    """
    with closing(open_store(gate)) as store:
        found = erasure.erasures(store, gate)
    lines = [f"{when(each.at_ms)}  {plain(each.event_id)}  {plain(each.who)}  {plain(each.reason)}" for each in found]
    print_either(as_json, [asdict(each) for each in found], lines, none="no case was erased")

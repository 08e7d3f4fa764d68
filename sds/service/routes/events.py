"""/v1/events: changes as server-sent events. The ledgers are the outbox; an event's id holds the position in each of them.

A client that comes back with `Last-Event-ID` goes on after it and gets each change once. No text of a case is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Header, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sds.kernel.errors import SdsError
from sds.kernel.storage.store import Reader
from sds.service.callers import Caller, Viewer, digest_of
from sds.service.operations import operations
from sds.service.operations.changes import Change, head, parse_positions, read_changes, write_positions
from sds.service.operations.following import Tail
from sds.service.problems import Problem
from sds.service.routes.described import CHANGES
from sds.service.state import Service, service

END_OF_LINE = "\n"  # readers that are no whole parsers look for an empty line as "\n\n"
BEGINNING = "position"  # the type of a stream's first event, which holds where the stream begins, and no change
SEND_S_MAX = 30.0  # a client that reads nothing for this time is disconnected

# The service ends its streams itself when it drains. The library's own way would stay in force for the whole process.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

router = APIRouter(prefix="/v1/events", tags=["events"])


class ChangeStream(EventSourceResponse):
    """A stream of events that ends without an error where its client is gone or does not read. `ping_s`: of heartbeats."""

    def __init__(self, content: AsyncIterator[ServerSentEvent], ping_s: float) -> None:
        super().__init__(content, ping=ping_s, send_timeout=SEND_S_MAX, sep=END_OF_LINE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)


async def place(request: Request, who: Viewer) -> AsyncIterator[None]:
    """Count a stream for as long as its request lasts. Raises Problem where as many are open as may be."""
    streams = operations(request).streams
    _check_room(service(request), streams, who)
    streams[who.name] += 1  # no await since the check, so that requests at the same time are all counted
    try:
        yield
    finally:
        streams[who.name] -= 1
        if not streams[who.name]:
            del streams[who.name]


@router.get("", response_class=EventSourceResponse, responses=CHANGES, dependencies=[Depends(place, scope="request")])
async def stream_events(
    request: Request,
    who: Viewer,
    gate: Annotated[list[str] | None, Query()] = None,
    after: str | None = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> ChangeStream:
    """Stream the changes at the gates that the key may see, or at those that `gate` names, as server-sent events.

    The stream begins now, or after the event in `Last-Event-ID`. `after` replaces this header for readers that cannot set
    it. Heartbeats are comments. The stream ends when the key is revoked or the service drains.
    """
    state = service(request)
    for name in gate or ():
        who.check("read", name)
    seen = state.gates_of(who)
    records = {name: state.gate(name).gate.kernel.store for name in (gate or seen)}
    positions = await run_in_threadpool(_start, records, last_event_id or after)
    digest = digest_of(request.headers["authorization"].partition(" ")[2])
    sent = _sent(state, operations(request).tail, digest, records, positions)
    return ChangeStream(sent, state.settings.heartbeat_s)


def _check_room(state: Service, streams: Counter[str], who: Caller) -> None:
    """Raise Problem where the service drains, or this key or all keys have as many streams as they may have."""
    settings = state.settings
    if state.draining:
        raise Problem("DRAINING")
    if streams[who.name] >= settings.streams_of_key_max:
        detail = f"the key has {settings.streams_of_key_max} streams open in this process, which is the limit"
        raise Problem("RATE_LIMITED", detail, hint="close one of them, or try again after `Retry-After`")
    if streams.total() >= settings.streams_max:
        raise Problem("UNAVAILABLE", f"{settings.streams_max} streams are open in this process, which is the limit")


def _start(records: Mapping[str, Reader], behind: str | None) -> dict[str, int]:
    """Return each gate's position to go on from: that of the event id `behind`, else the ledger's head. Raises Problem."""
    try:
        known = parse_positions(behind) if behind else {}
    except ValueError:
        raise Problem("CURSOR_INVALID", "`Last-Event-ID` or `after` is not an event's id of this service") from None
    heads = {gate: head(record) for gate, record in records.items()}
    if any(known.get(gate, 0) > idx for gate, idx in heads.items()):
        hint = "the record may have been restored: connect without `Last-Event-ID` and `after`"
        raise Problem("CURSOR_INVALID", "`Last-Event-ID` or `after` is ahead of the record", hint=hint)
    return {gate: known.get(gate, idx) for gate, idx in heads.items()}


async def _sent(
    state: Service, tail: Tail, digest: str, records: Mapping[str, Reader], positions: dict[str, int]
) -> AsyncIterator[ServerSentEvent]:
    """Yield the changes after `positions`, which move on with them, until the key is revoked or the service drains."""
    check_s = state.settings.stream_check_s
    # A browser dispatches no event whose data is empty, but keeps its id. Other readers keep an id only beside data.
    yield ServerSentEvent("", event=BEGINNING, id=write_positions(positions), retry=2_000, sep=END_OF_LINE)
    async with tail.followed():
        while not state.draining:
            try:
                page = await run_in_threadpool(_page, state, digest, records, positions)
            except SdsError:  # the client reconnects and goes on from its last event
                return
            if page is None:
                return
            for change in page:
                positions[change.gate] = change.idx
                data = orjson.dumps(change.as_data()).decode()
                yield ServerSentEvent(data, event=change.kind.lower(), id=write_positions(positions), sep=END_OF_LINE)
            if not page:
                await tail.grown(positions, check_s)


def _page(
    state: Service, digest: str, records: Mapping[str, Reader], positions: Mapping[str, int]
) -> list[Change] | None:
    """Return the next changes of all gates; each gate's are in the order of its ledger.

    None: the key is not valid now, or a ledger ends before its position, for its record was put back or a standby took over.
    """
    known = state.callers.look_up(digest)
    if known is None or not all(known.may_see(gate) for gate in records):
        return None
    changes = [change for gate, record in records.items() for change in read_changes(record, gate, positions[gate])]
    if not changes and any(head(record) < positions[gate] for gate, record in records.items()):
        return None
    return changes

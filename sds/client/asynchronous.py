"""The client for programs with an event loop: the calls of `sds.client.blocking`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from sds.client.calls import Calls, Event, segment
from sds.client.connection import TIMEOUT_S, Connection
from sds.client.following import Following
from sds.client.http import Collector, Opened, arguments, limits, lost
from sds.client.replies import Changed, HttpReply, Lost, answer_of
from sds.client.steps import HttpRequest, Said, Steps, Wait
from sds.kernel.flow.states import Answer

T = TypeVar("T")


class AsyncDecisionClient:
    """Asks a decision service. Use it as an async context manager, or await `close()`. For one event loop.

    Its parameters, results and errors are those of `DecisionClient`. A call that is cancelled may have been decided: the
    same event again returns its answer.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float = TIMEOUT_S,
        plain_http: bool = False,
        transport: httpx2.AsyncBaseTransport | None = None,
        random: Random | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connection = Connection(url, key, timeout_s, plain_http)
        self._random, self._now_s, self._sleep = random or SystemRandom(), now_s, sleep
        self._calls = Calls(self._connection, now_s=now_s, random=self._random)
        self._opened = Opened(lambda: httpx2.AsyncClient(base_url=url, transport=transport, limits=limits()))

    def __repr__(self) -> str:
        return f"AsyncDecisionClient({self._connection!r})"

    async def decide(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Ask for a decision on one event: see `DecisionClient.decide`."""
        return await self._run(
            self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key)
        )

    async def submit(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Submit one event without waiting for its decision: see `DecisionClient.submit`."""
        steps = self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key, wait=False)
        return await self._run(steps)

    async def get(self, dfid: str) -> Answer:
        """Return a decision as it is now. Without the role `review`, its reasons are codes alone."""
        return answer_of((await self.audit(dfid)).get("decision"))

    async def audit(self, dfid: str) -> Mapping[str, Any]:
        """Return a decision's `decision` and `audit`, and for the role `review` its whole `record` with all texts."""
        return await self._run(self._calls.one(f"/v1/decisions/{segment(dfid, 'decision')}"))

    def decisions(
        self,
        *,
        gate: str | None = None,
        state: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield decisions, newest first, without texts. Pages are fetched as needed. `state`: a flow's, such as ESCALATED."""
        return self._listed("decisions", gate=gate, state=state, since=since_ms, until=until_ms)

    def orders(
        self, gate: str, *, since_ms: int | None = None, until_ms: int | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the orders of a gate in a period, oldest first. Pages are fetched as needed. One that ends meanwhile comes
        again: the later one counts.
        """
        return self._listed("orders", gate=gate, since=since_ms, until=until_ms)

    async def _listed(self, what: str, **asked: str | int | None) -> AsyncIterator[Mapping[str, Any]]:
        after: str | None = None
        while True:
            page = await self._run(self._calls.page(f"/v1/{what}", what, **asked, cursor=after))
            for item in page.items:
                yield item
            if (after := page.after) is None:
                return

    async def gates(self) -> Sequence[Mapping[str, Any]]:
        """List the gates that the key may see, with the event that each takes."""
        return await self._run(self._calls.listed("/v1/gates", "gates"))

    async def escalations(self, *, gate: str | None = None, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        """List the cases that wait for a human, oldest first: all, or `limit` at most. `taken_by`: who has taken a case."""
        return await self._run(self._calls.cases(gate, limit))

    async def case(self, dfid: str) -> Mapping[str, Any]:
        """Return one case as it is now, with the decisions that are possible."""
        return await self._run(self._calls.one(f"/v1/escalations/{segment(dfid, 'case')}"))

    async def resolve(
        self,
        dfid: str,
        decision: str,
        *,
        reason: str,
        change: str = "",
        seen: str = "",
        reference: str = "",
        acknowledge: bool = False,
    ) -> Answer:
        """Carry out a human's decision about a case: see `DecisionClient.resolve`."""
        steps = self._calls.resolve(
            dfid, decision, change=change, reason=reason, seen=seen, reference=reference, acknowledge=acknowledge
        )
        return await self._run(steps)

    async def agents(self) -> Sequence[Mapping[str, Any]]:
        """List the agents of the gates that the key may see, with their status."""
        return await self._run(self._calls.listed("/v1/agents", "agents"))

    async def move_agent(self, agent_id: str, move: str, *, reason: str) -> Mapping[str, Any]:
        """Move an agent at every gate of the key that has it; return its record at the first. `move`: `suspend`, `reactivate`
        or `retire`. Raises UsageError or WorldError that names the gates where it was not moved.
        """
        return await self._run(self._calls.move_agent(agent_id, move, reason=reason))

    async def halted(self) -> Sequence[Mapping[str, Any]]:
        """Return for each gate whether it is halted, since when, by whom and why."""
        return await self._run(self._calls.listed("/v1/halt", "gates"))

    async def halt(self, *, reason: str, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Halt a gate, or all of the key's gates: from the next transaction on nothing is decided or sent."""
        return await self._run(self._calls.halt(halted=True, reason=reason, gate=gate))

    async def resume(self, *, reason: str, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Resume a gate, or all of the key's gates."""
        return await self._run(self._calls.halt(halted=False, reason=reason, gate=gate))

    async def _run(self, steps: Steps[T]) -> T:
        said: Said = None
        try:
            while True:
                step = steps.send(said)
                if isinstance(step, Wait):
                    await self._sleep(step.s)
                said = None if isinstance(step, Wait) else await self._sent(step)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _sent(self, request: HttpRequest) -> HttpReply | Lost:
        http = self._opened.client
        try:
            async with http.stream(**arguments(http, self._connection, request)) as response:
                return await self._collected(response, request)
        except httpx2.HTTPError as error:
            return lost(error)

    async def _collected(self, response: httpx2.Response, request: HttpRequest) -> HttpReply:
        collector = Collector(response, request, now_s=self._now_s)
        async for part in response.aiter_bytes():
            collector.add(part)
        return collector.reply()

    async def events(self, last_event_id: str = "") -> AsyncIterator[Changed]:
        """Follow the changes in the records: see `DecisionClient.events`."""
        following = Following(last_event_id, now_s=self._now_s, random=self._random)
        while True:
            request, http = following.request(), self._opened.client
            said: HttpReply | Lost = Lost("the stream ended")
            try:
                async with http.stream(**arguments(http, self._connection, request)) as response:
                    if not response.is_success:
                        said = await self._collected(response, request)
                    else:
                        async for sent in httpx2.EventSource(response):
                            if (change := following.seen(sent)) is not None:
                                yield change
            except httpx2.HTTPError as error:
                said = lost(error)
            await self._sleep(following.pause_s(said))

    async def close(self) -> None:
        await self._opened.client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

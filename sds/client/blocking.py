"""The synchronous client: each call blocks its thread until the reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class DecisionClient:
    """Asks a decision service. Use it as a context manager, or call `close()`. Thread-safe.

    `url`: of the service; `key`: as `sds keys add` printed it; `timeout_s`: how long a call without a deadline of its own may
    take, retries included; `plain_http`: `url` may be `http://` of another machine. Every call may raise UsageError (wrong
    key, gate or event) or WorldError (service, network).
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float = TIMEOUT_S,
        plain_http: bool = False,
        transport: httpx2.BaseTransport | None = None,
        random: Random | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connection = Connection(url, key, timeout_s, plain_http)
        self._random, self._now_s, self._sleep = random or SystemRandom(), now_s, sleep
        self._calls = Calls(self._connection, now_s=now_s, random=self._random)
        self._opened = Opened(lambda: httpx2.Client(base_url=url, transport=transport, limits=limits()))

    def __repr__(self) -> str:
        return f"DecisionClient({self._connection!r})"

    def decide(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Ask a gate for a decision on one event, a mapping or JSON text. The same event again returns the stored answer.

        `deadline_ms`: milliseconds from now, retries included. Without it, each try has the contract's time for a decision,
        and all tries together `timeout_s`. `idempotency_key`: without it, one is made for all tries of this call.
        """
        return self._run(self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key))

    def submit(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Submit one event; return once it is on record. While the answer is `pending`, `get` returns the decision later."""
        steps = self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key, wait=False)
        return self._run(steps)

    def get(self, dfid: str) -> Answer:
        """Return a decision as it is now. Without the role `review`, its reasons are codes alone."""
        return answer_of(self.audit(dfid).get("decision"))

    def audit(self, dfid: str) -> Mapping[str, Any]:
        """Return a decision's `decision` and `audit`, and for the role `review` its whole `record` with all texts."""
        return self._run(self._calls.one(f"/v1/decisions/{segment(dfid, 'decision')}"))

    def decisions(
        self,
        *,
        gate: str | None = None,
        state: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """Yield decisions, newest first, without texts. Pages are fetched as needed. `state`: a flow's, such as ESCALATED."""
        return self._listed("decisions", gate=gate, state=state, since=since_ms, until=until_ms)

    def orders(
        self, gate: str, *, since_ms: int | None = None, until_ms: int | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the orders of a gate in a period, oldest first. Pages are fetched as needed. One that ends meanwhile comes
        again: the later one counts.
        """
        return self._listed("orders", gate=gate, since=since_ms, until=until_ms)

    def _listed(self, what: str, **asked: str | int | None) -> Iterator[Mapping[str, Any]]:
        after: str | None = None
        while True:
            page = self._run(self._calls.page(f"/v1/{what}", what, **asked, cursor=after))
            yield from page.items
            if (after := page.after) is None:
                return

    def gates(self) -> Sequence[Mapping[str, Any]]:
        """List the gates that the key may see, with the event that each takes."""
        return self._run(self._calls.listed("/v1/gates", "gates"))

    def escalations(self, *, gate: str | None = None, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        """List the cases that wait for a human, oldest first: all, or `limit` at most. `taken_by`: who has taken a case."""
        return self._run(self._calls.cases(gate, limit))

    def case(self, dfid: str) -> Mapping[str, Any]:
        """Return one case as it is now, with the decisions that are possible."""
        return self._run(self._calls.one(f"/v1/escalations/{segment(dfid, 'case')}"))

    def resolve(
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
        """Carry out a human's decision about a case, once, as `Gate.resolve` does. The ledger names the key's owner.

        A request without a reply is not sent again: look at the case first. Raises UsageError where its state forbids it.
        """
        steps = self._calls.resolve(
            dfid, decision, change=change, reason=reason, seen=seen, reference=reference, acknowledge=acknowledge
        )
        return self._run(steps)

    def agents(self) -> Sequence[Mapping[str, Any]]:
        """List the agents of the gates that the key may see, with their status."""
        return self._run(self._calls.listed("/v1/agents", "agents"))

    def move_agent(self, agent_id: str, move: str, *, reason: str) -> Mapping[str, Any]:
        """Move an agent at every gate of the key that has it; return its record at the first. `move`: `suspend`, `reactivate`
        or `retire`. Raises UsageError or WorldError that names the gates where it was not moved.
        """
        return self._run(self._calls.move_agent(agent_id, move, reason=reason))

    def halted(self) -> Sequence[Mapping[str, Any]]:
        """Return for each gate whether it is halted, since when, by whom and why."""
        return self._run(self._calls.listed("/v1/halt", "gates"))

    def halt(self, *, reason: str, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Halt a gate, or all of the key's gates: from the next transaction on nothing is decided or sent."""
        return self._run(self._calls.halt(halted=True, reason=reason, gate=gate))

    def resume(self, *, reason: str, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Resume a gate, or all of the key's gates."""
        return self._run(self._calls.halt(halted=False, reason=reason, gate=gate))

    def _run(self, steps: Steps[T]) -> T:
        said: Said = None
        try:
            while True:
                step = steps.send(said)
                if isinstance(step, Wait):
                    self._sleep(step.s)
                said = None if isinstance(step, Wait) else self._sent(step)
        except StopIteration as done:
            result: T = done.value
            return result

    def _sent(self, request: HttpRequest) -> HttpReply | Lost:
        http = self._opened.client
        try:
            with http.stream(**arguments(http, self._connection, request)) as response:
                return self._collected(response, request)
        except httpx2.HTTPError as error:
            return lost(error)

    def _collected(self, response: httpx2.Response, request: HttpRequest) -> HttpReply:
        collector = Collector(response, request, now_s=self._now_s)
        for part in response.iter_bytes():
            collector.add(part)
        return collector.reply()

    def events(self, last_event_id: str = "") -> Iterator[Changed]:
        """Yield the changes in the gates' records, without end; a connection that breaks is opened again.

        `last_event_id`: the `id` of the last change that was seen, to go on after it; without it, from now on. Each change
        comes at least once.
        """
        following = Following(last_event_id, now_s=self._now_s, random=self._random)
        while True:
            request, http = following.request(), self._opened.client
            said: HttpReply | Lost = Lost("the stream ended")
            try:
                with http.stream(**arguments(http, self._connection, request)) as response:
                    if not response.is_success:
                        said = self._collected(response, request)
                    else:
                        for sent in httpx2.EventSource(response):
                            if (change := following.seen(sent)) is not None:
                                yield change
            except httpx2.HTTPError as error:
                said = lost(error)
            self._sleep(following.pause_s(said))

    def close(self) -> None:
        self._opened.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

"""The client that waits in the thread which asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random, SystemRandom
from types import TracebackType
from typing import Self, TypeVar

import httpx2

from sds.client.calls import Calls, Event
from sds.client.connection import TIMEOUT_S, Connection
from sds.client.following import Following
from sds.client.http import Collector, arguments, limits, lost
from sds.client.replies import Change, Lost, Reply
from sds.client.steps import HttpRequest, Said, Steps, Wait
from sds.kernel.flow.answer import Answer

T = TypeVar("T")


class DecisionClient:
    """Asks a decision service. Use it as a context manager, or call `close()`. Safe in several threads.

    `url`: of the service; `key`: what `sds keys add` showed; `timeout_s`: how long a call without a deadline of its own may
    take, retries included. Every call raises UsageError (yours: key, gate, event) or WorldError (the service's).
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx2.BaseTransport | None = None,
        random: Random | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connection = Connection(url, key, timeout_s)
        self._random, self._now_s, self._sleep = random or SystemRandom(), now_s, sleep
        self._calls = Calls(self._connection, now_s=now_s, random=self._random)
        self._http = httpx2.Client(base_url=url, transport=transport, limits=limits())

    def __repr__(self) -> str:
        return f"DecisionClient({self._connection!r})"

    def decide(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Decide one event of a gate, a mapping or JSON text. The same event again returns the stored answer.

        `deadline_ms`: milliseconds from now, retries included. Left out, each try has what the contract gives a decision,
        and all of them the client's `timeout_s`. `idempotency_key`: left out, one is made, for all tries of this call.
        """
        return self._run(self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key))

    def submit(
        self, gate: str, event: Event, *, deadline_ms: int | None = None, idempotency_key: str | None = None
    ) -> Answer:
        """Have one event taken, and return at once: an answer that is `pending`, until `get` says otherwise."""
        return self._run(
            self._calls.decide(gate, event, deadline_ms=deadline_ms, idempotency_key=idempotency_key, wait=False)
        )

    def _run(self, steps: Steps[T]) -> T:
        said: Said = None
        try:
            while True:
                step = steps.send(said)
                if isinstance(step, Wait):
                    self._sleep(step.s)
                said = None if isinstance(step, Wait) else self._sent(step)
        except StopIteration as done:
            found: T = done.value
            return found

    def _sent(self, request: HttpRequest) -> Reply | Lost:
        try:
            with self._http.stream(**arguments(self._connection, request)) as response:
                return self._collected(response, request)
        except httpx2.HTTPError as error:
            return lost(error)

    def _collected(self, response: httpx2.Response, request: HttpRequest) -> Reply:
        collector = Collector(response, request, now_s=self._now_s)
        for part in response.iter_bytes():
            collector.add(part)
        return collector.reply()

    def events(self, last_event_id: str = "") -> Iterator[Change]:
        """Follow what changes in the records of the gates, for as long as it is read; a connection that ends is opened anew.

        `last_event_id`: the `id` of a change that was seen: the next is the one behind it. Left out: what comes from now on.
        Each change comes at least once.
        """
        following = Following(last_event_id, now_s=self._now_s, random=self._random)
        while True:
            request = following.request()
            said: Reply | Lost = Lost("the stream ended")
            try:
                with self._http.stream(**arguments(self._connection, request)) as response:
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
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

"""A service as a script of replies, and a clock that only waits move."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx2

from sds.client import AsyncDecisionClient, DecisionClient

KEY = "sds_0123456789abcdef"
ANSWER = {
    "dfid": "019a", "gate": "toll", "event_id": "T-1", "state": "CLOSED", "outcome": "ACCEPTED", "action": "WAIVE",
    "params": {"amount": 100}, "justification": "EMERGENCY", "reason_code": None, "reasons": [], "tag": None,
    "execution": "SUCCESS", "reference": "r-1", "confidence": 0.9, "parent_dfid": None, "resolution": None,
    "resolved_by": None, "pending": False, "retryable": False,
}  # fmt: skip
EVENT = {"trip_id": "T-1", "car_id": "CAR-1", "text": "Please."}

Scripted = httpx2.Response | Exception


def decided(**changed: Any) -> httpx2.Response:
    return httpx2.Response(200, json={**ANSWER, **changed})


def problem(status: int, code: str, *, retryable: bool = False, after: str = "", **told: Any) -> httpx2.Response:
    data = {"type": f"/errors#{code}", "title": code.lower(), "reason_code": code, "retryable": retryable, **told}
    headers = {"Content-Type": "application/problem+json"} | ({"Retry-After": after} if after else {})
    return httpx2.Response(status, content=json.dumps(data), headers=headers)


class Clock:
    """`late_s`: how much longer each wait takes than it was to, as on a busy machine."""

    def __init__(self) -> None:
        self.s, self.late_s, self.waits = 0.0, 0.0, list[float]()

    def now_s(self) -> float:
        return self.s

    def sleep(self, s: float) -> None:
        self.waits.append(s)
        self.s += s + self.late_s

    async def asleep(self, s: float) -> None:
        self.sleep(s)


class Service:
    """Replies what the script says, one reply a request, and keeps the requests. `takes_s`: how long each takes."""

    def __init__(self, *script: Scripted, takes_s: float = 0.0) -> None:
        self.clock, self.requests = Clock(), list[httpx2.Request]()
        self._script, self._takes_s = iter(script), takes_s

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        self.clock.s += self._takes_s
        said = next(self._script)
        if isinstance(said, Exception):
            raise said
        return httpx2.Response(said.status_code, headers=said.headers, content=said.content)  # one is read only once

    def client(self, url: str = "https://service.example", **given: Any) -> DecisionClient:
        clock, transport = self.clock, httpx2.MockTransport(self.handle)
        return DecisionClient(
            url, KEY, transport=transport, random=Random(1), now_s=clock.now_s, sleep=clock.sleep, **given
        )

    def async_client(self, url: str = "https://service.example", **given: Any) -> AsyncDecisionClient:
        clock, transport = self.clock, httpx2.MockTransport(self.handle)
        return AsyncDecisionClient(
            url, KEY, transport=transport, random=Random(1), now_s=clock.now_s, sleep=clock.asleep, **given
        )

    def sent(self, name: str) -> list[str | None]:
        """Return a header of every request."""
        return [request.headers.get(name) for request in self.requests]

"""Load shedding: while a decision could not be had in time, a request for one is refused at the door, as cheaply as can be.

Otherwise what is refused would take the time of what was let in. No key is looked at, and no body read: that the service is
full is no secret. Some are let through all the same, `LOOKS_PER_S`: an event that is known is answered by reading alone. When
`LOOKED_AT_MAX` are looked at already, the next would only wait: however much room there seems to be, it is refused, too.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sds.service.deciding.terms import DEADLINE_HEADER
from sds.service.problems import SAFE_HEADERS, Problem, response_of
from sds.service.state import Service

LOOKS_PER_S, LOOKED_AT_MAX = 20.0, 16
CROWDED_S = 1.0
_ASKING = re.compile(r"/v1/gates/([a-z][a-z0-9_]{0,63})/decisions")
_DEADLINE = DEADLINE_HEADER.lower().encode()


class LoadShedding:
    """Wraps an application, outside of all that wraps it. `now_s`: a monotonic clock. `refused` is called with the reason
    code of what is refused, and how many seconds that took.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        now_s: Callable[[], float] = time.monotonic,
        refused: Callable[[str, float], object] = lambda *_: None,
    ) -> None:
        self._app, self._service, self._now_s, self._refused = app, service, now_s, refused
        self._looks, self._at_s = LOOKS_PER_S, now_s()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.perf_counter()
        problem = self._refusal(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        for message in _messages(problem.code, math.ceil(problem.retry_after_s or 0)):
            await send(message)
        self._refused(problem.code, time.perf_counter() - began_s)

    def _refusal(self, scope: Scope) -> Problem | None:
        """Return how a request is refused; None: it is none for a decision, or there may be time for it."""
        asked = _ASKING.fullmatch(scope["path"])
        gate = None if asked is None else self._service.gates.get(asked[1])
        if gate is None:
            return None
        admission = self._service.admission
        if admission.looked_at >= LOOKED_AT_MAX:
            return Problem("OVERLOADED", retry_after_s=CROWDED_S)
        problem = admission.refusal(gate.name, _left_ms(scope, gate.deadline_ms_max))
        return None if problem is None or self._may_look() else problem

    def _may_look(self) -> bool:
        """Take one look of those that a second has; a second's worth is the most that is saved up."""
        now_s = self._now_s()
        self._looks = min(LOOKS_PER_S, self._looks + (now_s - self._at_s) * LOOKS_PER_S)
        self._at_s = now_s
        if self._looks < 1:
            return False
        self._looks -= 1
        return True


@lru_cache(256)
def _messages(code: str, retry_after_s: int) -> tuple[Message, Message]:
    """Return what is sent to refuse, made once: while a service is full it is sent a thousand times a second."""
    response = response_of(Problem(code, retry_after_s=retry_after_s, headers=SAFE_HEADERS))
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    return start, {"type": "http.response.body", "body": bytes(response.body)}


def _left_ms(scope: Scope, most_ms: int) -> int:
    """Return how much time a request gives; what cannot be read is for the route to refuse."""
    given = next((value for name, value in scope["headers"] if name == _DEADLINE), b"")
    return int(given) if given.isdigit() and len(given) <= 12 else most_ms

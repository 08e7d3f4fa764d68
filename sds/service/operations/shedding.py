"""Load shedding: while a decision could not be had in time, a request for one is refused at the door, as cheaply as can be.

Otherwise what is refused would take the time of what was let in. No key is looked at, and no body read: that the service is
full is no secret. Some are let through all the same, `LOOKS_PER_S`: an event that is known is answered by reading alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from sds.service.deciding.terms import DEADLINE_HEADER
from sds.service.problems import Problem, response_of
from sds.service.state import Service

LOOKS_PER_S = 50.0
_ASKING = re.compile(r"/v1/gates/([a-z][a-z0-9_]{0,63})/decisions")
_DEADLINE = DEADLINE_HEADER.lower().encode()


class LoadShedding:
    """Wraps an application. `now_s`: a monotonic clock."""

    def __init__(self, app: ASGIApp, service: Service, now_s: Callable[[], float] = time.monotonic) -> None:
        self._app, self._service, self._now_s = app, service, now_s
        self._looks, self._at_s = LOOKS_PER_S, now_s()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refusal(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (self._app if problem is None else response_of(problem))(scope, receive, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        """Return how a request is refused; None: it is none for a decision, or there may be time for it."""
        asked = _ASKING.fullmatch(scope["path"])
        gate = None if asked is None else self._service.gates.get(asked[1])
        if gate is None:
            return None
        problem = self._service.admission.refusal(gate.name, _left_ms(scope, gate.deadline_ms_max))
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


def _left_ms(scope: Scope, most_ms: int) -> int:
    """Return how much time a request gives; what cannot be read is for the route to refuse."""
    given = next((value for name, value in scope["headers"] if name == _DEADLINE), b"")
    return int(given) if given.isdigit() and len(given) <= 12 else most_ms

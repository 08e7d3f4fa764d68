"""Load shedding: while a decision could not be had in time, a request for one is refused at the door, as cheaply as can be.

Otherwise what is refused would take the time of what was let in. No key is looked at, and no body read: that the service is
full is no secret. Some are let through all the same, `LOOKS_PER_S`: an event that is known is answered by reading alone.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from sds.service.deciding.terms import DEADLINE_HEADER
from sds.service.problems import SAFE_HEADERS, Problem, response_of
from sds.service.state import Service

LOOKS_PER_S = 20.0
_ASKING = re.compile(rb"/v1/gates/([a-z][a-z0-9_]{0,63})/decisions(?:\?.*)?")
_DEADLINE = DEADLINE_HEADER.lower().encode()

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case
Refusal = tuple[int, Headers, bytes]  # status, headers and body of an answer


class LoadShedding:
    """Is asked by a connection about each POST, once its head is there. `now_s`: a monotonic clock. `refused` is called with
    the reason code of what is refused, and how many seconds that took.
    """

    def __init__(
        self,
        service: Service,
        now_s: Callable[[], float] = time.monotonic,
        refused: Callable[[str, float], object] = lambda *_: None,
    ) -> None:
        self._service, self._now_s, self._refused = service, now_s, refused
        self._looks, self._at_s = LOOKS_PER_S, now_s()

    def refusal(self, url: bytes, headers: Headers) -> Refusal | None:
        """Return how a request is refused; None: it is none for a decision, or there may be time for it."""
        began_s, admission = time.perf_counter(), self._service.admission
        if admission.calm:
            return None
        asked = _ASKING.fullmatch(url)
        gate = None if asked is None else self._service.gates.get(asked[1].decode())
        if gate is None:
            return None
        if (problem := admission.crowded()) is None:
            problem = admission.refusal(gate.name, _left_ms(headers, gate.deadline_ms_max))
            if problem is None or self._may_look():
                return None
        found = _answer(problem.code, math.ceil(problem.retry_after_s or 0))
        self._refused(problem.code, time.perf_counter() - began_s)
        return found

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
def _answer(code: str, retry_after_s: int) -> Refusal:
    """Return what is sent to refuse, made once: while a service is full it is sent a thousand times a second."""
    response = response_of(Problem(code, retry_after_s=retry_after_s, headers=SAFE_HEADERS))
    return response.status_code, response.raw_headers, bytes(response.body)


def _left_ms(headers: Headers, most_ms: int) -> int:
    """Return how much time a request gives; what cannot be read is for the route to refuse."""
    given = next((value for name, value in headers if name == _DEADLINE), b"")
    return int(given) if given.isdigit() and len(given) <= 12 else most_ms

"""Load shedding: refuse a request for a decision as cheaply as possible while a decision could not be made in time.

Otherwise refused requests would take the time of admitted ones. No key is checked and no body read: that the service is full
is no secret. `LOOKS_PER_S` requests pass all the same, since an event that is known is answered by reading alone.
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
    """A connection asks it about each POST once it has read the head. `now_s`: a monotonic clock. `refused` is called with
    the reason code of each refusal, and the seconds that the refusal took.
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
        """Return the answer that refuses a request; None: it may pass, or asks for no decision of a gate that is served."""
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
        answer = _answer(problem.code, problem.detail, math.ceil(problem.retry_after_s or 0))
        self._refused(problem.code, time.perf_counter() - began_s)
        return answer

    def _may_look(self) -> bool:
        """Take a token from a bucket that gains and holds `LOOKS_PER_S`; return whether there was one."""
        now_s = self._now_s()
        self._looks = min(LOOKS_PER_S, self._looks + (now_s - self._at_s) * LOOKS_PER_S)
        self._at_s = now_s
        if self._looks < 1:
            return False
        self._looks -= 1
        return True


@lru_cache(256)
def _answer(code: str, detail: str, retry_after_s: int) -> Refusal:
    """Return the answer that refuses a request. It is cached: a full service sends it a thousand times a second."""
    response = response_of(Problem(code, detail, retry_after_s=retry_after_s, headers=SAFE_HEADERS))
    return response.status_code, response.raw_headers, bytes(response.body)


def _left_ms(headers: Headers, most_ms: int) -> int:
    """Return a request's deadline; the longest where its headers have none, or an invalid one, which the route refuses."""
    given = next((value for name, value in headers if name == _DEADLINE), b"")
    return int(given) if given.isdigit() and len(given) <= 12 else most_ms

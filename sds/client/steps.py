"""The requests and retries of a call, without I/O: a call is a generator, and the client does what it yields.

    yields HttpRequest(...)   send it once; give back its HttpReply, or Lost where none came
    yields Wait(s)        sleep; give back None
    returns               the call's result; raises SdsError where there is none

The synchronous and the asynchronous client differ only in how they run these generators.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TypeVar

from sds.client.replies import HttpReply, Lost, act_failure, failure
from sds.kernel.errors import SdsError

TRIES_MAX = 64
BACKOFF_S, BACKOFF_S_MAX, DOUBLINGS_MAX = 0.05, 5.0, 10
RETRY_AFTER_S_MAX = 60.0
GRACE_S = 1.0  # time after a deadline for the service to report that it passed


@dataclass(frozen=True)
class HttpRequest:
    """One request. `timeout_s`: how long to wait for its reply."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout_s: float = GRACE_S


@dataclass(frozen=True)
class Wait:
    s: float


T = TypeVar("T")
Step = HttpRequest | Wait
Said = HttpReply | Lost | None
Steps = Generator[Step, Said, T]


class Patience:
    """The time of a call, its retries included, and the pauses between them. `now_s`: a monotonic clock."""

    def __init__(self, lasts_s: float, *, now_s: Callable[[], float], random: Random) -> None:
        self._now_s, self._random = now_s, random
        self._until_s = now_s() + lasts_s

    @property
    def left_s(self) -> float:
        return self._until_s - self._now_s()

    def pause_s(self, tries: int, retry_after_s: float) -> float:
        """Return the pause after `tries` tries: the service's `Retry-After`, plus full jitter up to a doubling bound."""
        jitter_s_max = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(tries - 1, DOUBLINGS_MAX))
        return min(retry_after_s, RETRY_AFTER_S_MAX) + self._random.uniform(0.0, jitter_s_max)


def insist(
    ask: Callable[[float], HttpRequest],
    patience: Patience,
    *,
    open_still: Callable[[HttpReply], bool] = lambda _: False,
    once: bool = False,
) -> Steps[HttpReply]:
    """Send a request until a reply is successful, while another try may help and there is time; return that reply.

    `ask` makes the request from the seconds left. A successful reply that is `open_still` is tried again, and returned when
    the time is over. `once`: what may have been done is not sent again. Raises the last reply's error.
    """
    for tries in count(1):
        said = yield ask(patience.left_s)
        if said is None:
            raise TypeError("a request was sent and nothing given back")
        error = act_failure(said) if once else failure(said)
        if isinstance(said, HttpReply) and error is None and not open_still(said):
            return said
        pause_s = patience.pause_s(tries, said.retry_after_s)
        over = tries == TRIES_MAX or pause_s >= patience.left_s or (error is not None and not _may_help(said, error))
        if not over:
            yield Wait(pause_s)
            over = patience.left_s <= 0  # on a busy machine the sleep may take longer
        if over:
            if isinstance(said, HttpReply) and error is None:
                return said
            raise error or AssertionError
    raise AssertionError  # count() has no end


def _may_help(said: HttpReply | Lost, error: SdsError) -> bool:
    """Tell whether to send a request again. A 404 is returned to the caller, even if retryable: it may never be there."""
    return error.retryable and not (isinstance(said, HttpReply) and said.status == 404)

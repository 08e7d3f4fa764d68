"""What a client asks and how long it insists, without I/O: a call is a generator, and whoever runs it does what it yields.

    yields HttpRequest(...)   send it once; give back its HttpReply, or Lost where none came
    yields Wait(s)        sleep; give back None
    returns               what was asked for; raises SdsError where it cannot be had

The sync and the async client differ in how they run these, and in nothing else.
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
GRACE_S = 1.0  # a service that ends a decision at its deadline has yet to say so


@dataclass(frozen=True)
class HttpRequest:
    """One request. `body`: the bytes that go out; `timeout_s`: how long its reply is waited for."""

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
    """How long a call may take, its retries included, and how long it pauses between two. `now_s`: a monotonic clock."""

    def __init__(self, lasts_s: float, *, now_s: Callable[[], float], random: Random) -> None:
        self._now_s, self._random = now_s, random
        self._until_s = now_s() + lasts_s

    @property
    def left_s(self) -> float:
        return self._until_s - self._now_s()

    def pause_s(self, tries: int, retry_after_s: float) -> float:
        """Return how long to wait after so many tries: full jitter under a doubling roof, behind what the service asks."""
        roof_s = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(tries - 1, DOUBLINGS_MAX))
        return min(retry_after_s, RETRY_AFTER_S_MAX) + self._random.uniform(0.0, roof_s)


def insist(
    ask: Callable[[float], HttpRequest],
    patience: Patience,
    *,
    open_still: Callable[[HttpReply], bool] = lambda _: False,
    once: bool = False,
) -> Steps[HttpReply]:
    """Ask until there is a reply that is none of `failure`, as long as another try may help and there is time for it.

    `ask` makes the request of the seconds that are left. A reply that leaves it `open_still` is returned when the time is
    over. `once`: what may have been done is not sent again. Raises what the last reply was.
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
            over = patience.left_s <= 0  # it took longer than it was to: a busy machine
        if over:
            if isinstance(said, HttpReply) and error is None:
                return said
            raise error or AssertionError
    raise AssertionError  # count() has no end


def _may_help(said: HttpReply | Lost, error: SdsError) -> bool:
    """Tell whether to ask again on the caller's behalf: what is not there may never be, so that is for the caller to wait for."""
    return error.retryable and not (isinstance(said, HttpReply) and said.status == 404)

"""Ending what another thread decides: only while it waits, for the model, for its key or for others.

What is in the kernel's hands goes on to where it waits next, or to its end: nothing is cut off between a reservation and
its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sds.kernel.errors import SdsError, WorldError
from sds.kernel.flow.answer import Answer
from sds.models.protocol import ENDINGS


@dataclass(frozen=True, slots=True)
class StopCause:
    """Why a decision is stopped: its reason code, and one line."""

    code: str
    message: str

    def error(self) -> WorldError:
        """Return what is raised where nothing was recorded that could be answered: the event may be sent again."""
        return WorldError(self.message, reason_code=self.code, retryable=True)


CANCELLED = StopCause("CANCELLED", "the decision was cancelled")
DRAINING = StopCause("DRAINING", "the gate is closing: it takes nothing new")

End = Callable[[StopCause], Answer]


class StoppedError(Exception):
    """The decision was stopped. `answer`: how its flow was ended, None where it had none."""

    def __init__(self, cause: StopCause, answer: Answer | None) -> None:
        super().__init__(cause.message)
        self.cause, self.answer = cause, answer


class Cancellation:
    """Shared by the thread that decides and whoever may stop it. The first cause counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._cause: StopCause | None = None
        self._end: End | None = None  # of the flow that is open where it waits
        self._waits, self._commits = False, False
        self.stopped: StoppedError | None = None  # it has ended: whoever decides it touches the record no more

    @property
    def asked(self) -> bool:
        """Whether it is to end: nothing new is begun for it."""
        return self._cause is not None

    def stop(self, cause: StopCause) -> bool:
        """Ask for the end. Return whether nothing will be committed for it; False: what was proposed may be by now."""
        with self._lock:
            self._cause = self._cause or cause
            if self._waits:
                self._stop(self._end)
            return self.stopped is not None or not self._commits

    @contextmanager
    def waiting(self, end: End | None = None, *, commits: bool = False) -> Iterator[None]:
        """Wait in a block, in which it may be stopped; `end` then ends the flow that is open. Raises StoppedError.

        `commits`: whatever the block comes to is committed next.
        """
        with self._lock:
            if self._cause is not None:
                self._stop(end)
            self._refuse()
            self._waits, self._end, self._commits = True, end, False
        try:
            yield
        except ENDINGS:  # whoever interrupts the program: the flow stays open until its lease ends
            self._waits = False
            raise
        except BaseException:
            self._leave(commits)
            raise
        else:
            self._leave(commits)

    def _leave(self, commits: bool) -> None:
        with self._lock:
            self._refuse()
            self._waits, self._end, self._commits = False, None, commits

    def _refuse(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def _stop(self, end: End | None) -> None:
        if self.stopped is not None or self._cause is None:
            return
        answer: Answer | None = None
        with suppress(
            SdsError
        ):  # a store that refuses, or a flow that somebody else has ended: nothing can be answered
            answer = end(self._cause) if end is not None else None
        self.stopped = StoppedError(self._cause, answer)

"""Waiting for a turn with an engine. Who is late for want of one tells of the load, nothing of the engine's health."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sds.kernel.errors import ModelError
from sds.stops import DEADLINE_EXCEEDED


class NoTurnError(ModelError):
    """There was no turn in time, or so late a one that most of the time had been waited away."""

    reason_code = DEADLINE_EXCEEDED


@contextmanager
def after_waiting(asked_ms: float, turn_ms: float, deadline_ms: float) -> Iterator[None]:
    """Tell what is late inside as NoTurnError where the wait from `asked_ms` to `turn_ms` took most of the time."""
    try:
        yield
    except ModelError as error:
        if error.reason_code == DEADLINE_EXCEEDED and waited_away(asked_ms, turn_ms, deadline_ms):
            raise NoTurnError(str(error), hint=error.hint) from error
        raise


def waited_away(asked_ms: float, turn_ms: float, deadline_ms: float) -> bool:
    """Return whether less was left at the turn than had been waited for it."""
    return turn_ms - asked_ms > max(0, deadline_ms - turn_ms)

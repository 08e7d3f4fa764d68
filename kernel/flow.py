"""The life of a decision flow (DIR 4.3), as a pure table: which state may follow which."""

from __future__ import annotations

from typing import Literal

from sds.kernel.errors import TransitionError

State = Literal["CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "EXECUTING", "CLOSED", "ABORTED", "ESCALATED"]

_NEXT: dict[State, frozenset[State]] = {
    "CREATED": frozenset({"ACTIVE"}),
    "ACTIVE": frozenset({"VALIDATING", "ABORTED"}),
    "VALIDATING": frozenset({"ACCEPTED", "ABORTED", "ESCALATED", "ACTIVE"}),
    "ACCEPTED": frozenset({"EXECUTING", "ABORTED", "CLOSED"}),
    "EXECUTING": frozenset({"CLOSED", "ABORTED"}),
    "ESCALATED": frozenset({"ACCEPTED", "ABORTED"}),
    "CLOSED": frozenset(),
    "ABORTED": frozenset(),
}

FINAL: frozenset[State] = frozenset({"CLOSED", "ABORTED", "ESCALATED"})
# An event whose flow ended for one of these may have a fresh one: nothing was decided about the case itself.
RESTARTABLE_TAGS = frozenset(
    {
        "STATE_DRIFT_DETECTED",
        "RESOURCE_CONTENTION",
        "SPEND_LIMIT_EXCEEDED",
        "INTERRUPTED",
        "HALTED",
        "AGENT_SUSPENDED",
        "CONTRACT_REVOKED",
    }
)


def walk(start: State, *path: State) -> State:
    """Follow `path` from `start`, one permitted step at a time. Raises TransitionError at the first that is not."""
    for state in path:
        if state not in _NEXT[start]:
            raise TransitionError(f"a flow cannot go from {start} to {state}")
        start = state
    return start

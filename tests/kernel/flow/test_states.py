"""The life of a flow: what may follow what, and what never does."""

from __future__ import annotations

from typing import get_args

import pytest

from sds.kernel.errors import TransitionError
from sds.kernel.flow.states import _NEXT, FINAL, State, transition


@pytest.mark.parametrize(
    "life",
    [
        ("CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "EXECUTING", "CLOSED"),
        ("CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "CLOSED"),
        ("CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "ABORTED"),
        ("CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "EXECUTING", "ABORTED"),
        ("CREATED", "ACTIVE", "VALIDATING", "ACTIVE", "VALIDATING", "ESCALATED", "ACCEPTED"),
        ("CREATED", "ACTIVE", "ABORTED"),
    ],
)
def test_a_flow_lives_as_the_specification_draws_it(life: tuple[State, ...]):
    assert life[-1] == transition(*life)


@pytest.mark.parametrize(
    "life",
    [
        ("CREATED", "VALIDATING"),
        ("ACTIVE", "ACCEPTED"),
        ("ACTIVE", "EXECUTING"),
        ("ACTIVE", "CLOSED"),
        ("VALIDATING", "EXECUTING"),
        ("VALIDATING", "CLOSED"),
        ("ACCEPTED", "ACTIVE"),
        ("EXECUTING", "ACTIVE"),
        ("ESCALATED", "EXECUTING"),
        ("ESCALATED", "CLOSED"),
    ],
)
def test_no_step_of_a_flow_is_skipped(life: tuple[State, State]):
    with pytest.raises(TransitionError) as caught:
        transition(*life)
    assert f"a flow cannot go from {life[0]} to {life[1]}" == str(caught.value)


@pytest.mark.parametrize("over", ["CLOSED", "ABORTED"])
def test_nothing_follows_the_end(over: State):
    assert over in FINAL
    for state in get_args(State):
        with pytest.raises(TransitionError):
            transition(over, state)


def test_every_state_is_reached_and_leads_to_an_end():
    assert set(get_args(State)) == set(_NEXT)
    reached, ending = {"CREATED"}, {"CLOSED", "ABORTED"}
    for _ in _NEXT:
        reached |= {after for state in reached for after in _NEXT[state]}
        ending |= {state for state, after in _NEXT.items() if after & ending}
    assert set(_NEXT) == reached == ending

"""A state source may raise anything and return anything: what is no state leaves only the human."""

from __future__ import annotations

from asyncio import CancelledError

import pytest

from sds.kernel.envelope.state import StateRead
from tests.kernel.durable import World, escalate
from tests.kernel.faults import WordlessError


class _Panic(BaseException):
    """What a library in another language raises when it gives up."""


class _Version:
    """A number of a version that its source can write as text, but is none."""

    def encode(self) -> bytes:
        return b"1"


@pytest.mark.parametrize(
    "error", [WordlessError(), TimeoutError(), RuntimeError("no such\ntable"), CancelledError(), _Panic()]
)
def test_a_source_that_raises_leaves_only_the_human_and_says_why_in_one_line(world: World, error: BaseException):
    def fail(_key: str) -> None:
        raise error

    world.tickets.on_read = fail
    packet = world.packet()
    said = {"RuntimeError": "no such table"}.get(type(error).__name__, type(error).__name__)
    assert (f"state cannot be read: {said}", ("ESCALATE",)) == (packet.notes[0], packet.envelope.names)


def test_who_interrupts_the_program_while_state_is_read_is_not_held_up(world: World):
    def interrupt(_key: str) -> None:
        raise KeyboardInterrupt

    world.tickets.on_read = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.packet()


READS = [StateRead(None, "1"), StateRead({}, None), StateRead({}, "\ud800"), StateRead({}, _Version()), "text", 7]  # type: ignore[arg-type]  # what a careless source may return


@pytest.mark.parametrize("read", READS)
def test_a_source_that_returns_no_state_leaves_only_the_human(
    world: World, read: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(world.tickets, "read", lambda _key: read)
    packet = world.packet()
    assert ("ESCALATE",) == packet.envelope.names
    assert packet.notes
    answer = world.kernel.decide(packet, escalate(packet))
    assert ("ESCALATED", "ESCALATED_BY_RULE") == (answer.state, answer.reason_code)


@pytest.mark.parametrize("read", [{"ticket.open_minor": 5}, StateRead({}, 7)])  # type: ignore[arg-type]
def test_a_source_that_returns_another_type_is_told_what_to_return(
    world: World, read: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(world.tickets, "read", lambda _key: read)
    assert "state cannot be read: the source returned no StateRead whose version is text" == world.packet().notes[0]


def test_a_version_that_only_one_of_the_stores_could_keep_is_no_state(world: World, monkeypatch: pytest.MonkeyPatch):
    found = world.tickets.read("T1")
    assert found is not None
    monkeypatch.setattr(world.tickets, "read", lambda _key: StateRead(found.fields, "a\0b"))
    answer = world.decide(escalate)
    assert ("gate 5: ESCALATED_BY_RULE: state cannot be read: its version has the character U+0000",) == answer.reasons

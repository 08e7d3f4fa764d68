"""A service that is full refuses at the door, and goes on looking at a few requests a second: they may be known."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from sds.service.admission import Admission
from sds.service.operations.shedding import LOOKED_AT_MAX, LOOKS_PER_S, LoadShedding
from tests.service.testbed import EVENT, opened_bed

PATH = "/v1/gates/toll/decisions"


class Door:
    """Load shedding before an application that only counts, with one decision of a second in hand."""

    def __init__(self) -> None:
        self.admission, self.now_s, self.reached = Admission(parallel=1, queue_max=10), 0.0, 0
        self.admission.took("toll", 1_000.0)
        self.leave = self.admission.enter("toll", 1e9)
        gate = SimpleNamespace(name="toll", deadline_ms_max=30_000)
        service: Any = SimpleNamespace(gates={"toll": gate}, admission=self.admission)
        self.refused = list[str]()
        self._door = LoadShedding(self._app, service, lambda: self.now_s, lambda code, _: self.refused.append(code))

    async def _app(self, *_: object) -> None:
        self.reached += 1

    def ask(self, deadline: bytes = b"100", path: str = PATH, method: str = "POST") -> dict[str, Any] | None:
        """Return the problem that a request is refused with; None: the application was reached."""
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("the body is not read")

        headers = [(b"deadline-ms", deadline)] if deadline else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self._door(scope, receive, send))
        return orjson.loads(sent[1]["body"]) | {"headers": dict(sent[0]["headers"])} if sent else None


@pytest.fixture
def full() -> Door:
    """One that has had its looks."""
    door = Door()
    assert [None] * int(LOOKS_PER_S) == [door.ask() for _ in range(int(LOOKS_PER_S))]
    return door


def test_what_cannot_be_had_in_time_is_refused_without_the_application(full: Door) -> None:
    reached, problem = full.reached, full.ask()
    assert problem is not None
    assert ("OVERLOADED", 503, True) == (problem["reason_code"], problem["status"], problem["retryable"])
    assert (b"2", b"nosniff") == (problem["headers"][b"retry-after"], problem["headers"][b"x-content-type-options"])
    assert (reached, ["OVERLOADED"]) == (full.reached, full.refused)


def test_a_few_a_second_are_looked_at_all_the_same(full: Door) -> None:
    full.now_s += 0.1
    assert [None] * 2 == [full.ask() for _ in range(2)]
    assert full.ask() is not None


def test_who_would_only_wait_to_be_looked_at_is_refused_however_much_time_there_is() -> None:
    door = Door()
    with ExitStack() as looking:
        for _ in range(LOOKED_AT_MAX):
            assert door.ask(b"20000") is None
            looking.enter_context(door.admission.looking())
        problem = door.ask(b"20000")
    assert "OVERLOADED" == (problem or {})["reason_code"]
    assert door.ask(b"20000") is None


@pytest.mark.parametrize(
    ("deadline", "path", "method"),
    [
        (b"5000", PATH, "POST"),
        (b"", PATH, "POST"),
        (b"soon", PATH, "POST"),
        (b"100", PATH, "GET"),
        (b"100", "/v1/gates/other/decisions", "POST"),
        (b"100", "/v1/halt", "POST"),
    ],
)
def test_what_there_is_time_for_and_what_is_no_decision_goes_on(
    full: Door, deadline: bytes, path: str, method: str
) -> None:
    assert full.ask(deadline, path, method) is None


def test_when_there_is_room_again_everything_goes_on(full: Door) -> None:
    full.leave()
    assert full.ask() is None


def test_a_refusal_at_the_door_is_counted_and_has_the_headers_of_every_answer(home: Path) -> None:
    with opened_bed(home, queue_max=1) as bed:
        leave = bed.service.admission.enter("toll", 1e9)
        answers = [bed.post({**EVENT, "trip_id": f"T-{n}"}) for n in range(int(LOOKS_PER_S) + 5)]
        leave()
        assert {503} == {answer.status_code for answer in answers}
        assert "no-store" == answers[-1].headers["cache-control"]
        assert f'sds_refusals_total{{code="QUEUE_FULL"}} {len(answers)}.0' in bed.client.get("/metrics").text
        assert 200 == bed.post().status_code

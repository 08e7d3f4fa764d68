"""A service that is full refuses at the door, and goes on looking at a few requests a second: they may be known."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from sds.service.admission import LOOKED_AT_MAX, Admission
from sds.service.operations.shedding import LOOKS_PER_S, LoadShedding
from tests.service.testbed import EVENT, opened_bed

URL = b"/v1/gates/toll/decisions"


class Door:
    """Load shedding with one decision of a second in hand."""

    def __init__(self) -> None:
        self.admission, self.now_s = Admission(parallel=1, queue_max=10), 0.0
        self.admission.took("toll", 1_000.0)
        self.leave = self.admission.enter("toll", 1e9)
        gate = SimpleNamespace(name="toll", deadline_ms_max=30_000)
        service: Any = SimpleNamespace(gates={"toll": gate}, admission=self.admission)
        self.refused = list[str]()
        self._door = LoadShedding(service, lambda: self.now_s, lambda code, _: self.refused.append(code))

    def ask(self, deadline: bytes = b"100", url: bytes = URL) -> dict[str, Any] | None:
        """Return the problem that a request is refused with; None: it goes on."""
        found = self._door.refusal(url, [(b"deadline-ms", deadline)] if deadline else [])
        return None if found is None else orjson.loads(found[2]) | {"status": found[0], "headers": dict(found[1])}


@pytest.fixture
def full() -> Door:
    """One that has had its looks."""
    door = Door()
    assert [None] * int(LOOKS_PER_S) == [door.ask() for _ in range(int(LOOKS_PER_S))]
    return door


def test_what_cannot_be_had_in_time_is_refused(full: Door) -> None:
    problem = full.ask()
    assert problem is not None
    assert ("OVERLOADED", 503, True) == (problem["reason_code"], problem["status"], problem["retryable"])
    assert (b"2", b"nosniff") == (problem["headers"][b"retry-after"], problem["headers"][b"x-content-type-options"])
    assert ["OVERLOADED"] == full.refused


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
    ("deadline", "url"),
    [
        (b"5000", URL),
        (b"", URL),
        (b"soon", URL),
        (b"100", b"/v1/gates/other/decisions"),
        (b"100", b"/v1/halt"),
        (b"100", URL + b"/x"),
    ],
)
def test_what_there_is_time_for_and_what_is_no_decision_goes_on(full: Door, deadline: bytes, url: bytes) -> None:
    assert full.ask(deadline, url) is None


def test_when_there_is_room_again_everything_goes_on(full: Door) -> None:
    full.leave()
    assert full.ask() is None


def test_a_refusal_at_the_door_is_counted_and_has_the_headers_of_every_answer(home: Path) -> None:
    with opened_bed(home, queue_max=1) as bed:
        leave = bed.service.admission.enter("toll", 1e9)
        answers = [bed.post({**EVENT, "trip_id": f"T-{n}"}) for n in range(int(LOOKS_PER_S) + 5)]
        leave()
        assert {503} == {answer.status_code for answer in answers}
        assert all("1 decisions, the limit," in answer.json()["detail"] for answer in answers)
        assert "no-store" == answers[-1].headers["cache-control"]
        assert f'sds_refusals_total{{code="QUEUE_FULL"}} {len(answers)}.0' in bed.client.get("/metrics").text
        assert 200 == bed.post().status_code

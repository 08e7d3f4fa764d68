"""An agent that several gates of one service have: what stops it stops it at all of them, or says where it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sds.client import DecisionClient
from sds.definitions.registry import find
from sds.gate import Gate
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.registry import registry
from sds.service.gates import OpenGate, OpenGates
from tests.gates.own import GATE, written
from tests.proposers import Greedy
from tests.service.testbed import Bed, check, opened_bed

AGENT = "/v1/agents/toll-agent"


@pytest.fixture
def both(home: Path) -> Iterator[Bed]:
    """The toll gate and the gate `ferry`, each with a record of its own in which its agent is called `toll-agent`."""
    code = GATE.replace("gate: toll", "gate: ferry").replace('name="toll"', 'name="ferry"') + f"# {home}\n"
    definition = find(written(home / "ferry_gate", code))
    with opened_bed(home) as bed, Gate.load(definition, engine=Greedy("WAIVE")) as gate:
        bed.service.gates = OpenGates({**bed.gates, "ferry": OpenGate(definition, gate)})
        yield bed


def statuses(bed: Bed) -> dict[str, str]:
    return {each["gate"]: each["status"] for each in bed.client.get("/v1/agents").json()["agents"]}


def moved(bed: Bed, move: str, key: str | None = None, reason: str = "too generous") -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return bed.client.post(f"{AGENT}/{move}", json={"reason": reason}, headers=headers)


def moves(bed: Bed, gate: str) -> list[tuple[str, str, str]]:
    rows = bed.service.gates[gate].gate.store.rows("SELECT body FROM ledger WHERE kind = 'AGENT' ORDER BY idx")
    found = [json.loads(body) for (body,) in rows[2:]]
    return [(each["status"], each["who"], each["reason"]) for each in found]


def decided_at(bed: Bed, gate: str, trip: str) -> str:
    opened: Gate = bed.service.gates[gate].gate
    return opened.decide({"trip_id": trip, "car_id": "CAR-1", "text": "Please."}).state


def test_an_agent_is_suspended_reactivated_and_retired_at_every_gate_that_has_it(both: Bed) -> None:
    for move, status in (("suspend", "SUSPENDED"), ("reactivate", "ACTIVE"), ("retire", "RETIRED")):
        answer = moved(both, move, reason=f"to {move}")
        assert (200, status) == (answer.status_code, answer.json()["agent"]["status"])
        assert {"toll": status, "ferry": status} == statuses(both)
        for gate in ("toll", "ferry"):
            assert (status, "everything", f"to {move}") == moves(both, gate)[-1]
            assert ("CLOSED" if status == "ACTIVE" else "ESCALATED") == decided_at(both, gate, f"T-{move}")


def test_where_an_agent_has_the_status_already_only_the_other_gate_is_written_to(both: Bed) -> None:
    ferry = both.service.gates["ferry"].gate.store
    registry.transition(ferry, "toll-agent", "SUSPENDED", by="operator", who="ada", reason="mine", now_ms=both.clock())
    assert 200 == moved(both, "suspend").status_code
    assert {"toll": "SUSPENDED", "ferry": "SUSPENDED"} == statuses(both)
    assert [("SUSPENDED", "ada", "mine")] == moves(both, "ferry")
    again = check(moved(both, "suspend"), 409, "CONFLICT")
    assert "agent `toll-agent` is SUSPENDED already" == again["detail"]
    assert 1 == len(moves(both, "toll"))


def test_a_key_for_one_gate_stops_the_agent_there_and_is_told_where_it_goes_on(both: Bed) -> None:
    key = both.key_for("ada", ("operate", "read"), ("ferry",))
    for _ in range(2):  # the second time nothing is left to do with this key, and it is not said to be done
        refused = check(moved(both, "suspend", key), 403, "GATE_FORBIDDEN")
        said = "agent `toll-agent` is not SUSPENDED at `toll` (the key of `ada` is not for this gate); it is at `ferry`"
        assert said == refused["detail"]
        assert {"toll": "ACTIVE", "ferry": "SUSPENDED"} == statuses(both)
    assert 1 == len(moves(both, "ferry"))
    transport = both.client._transport
    with DecisionClient("https://testserver", key, transport=transport) as client, pytest.raises(UsageError) as error:
        client.move_agent("toll-agent", "retire", reason="over")
    assert "is not RETIRED at `toll`" in str(error.value)
    assert {"toll": "ACTIVE", "ferry": "RETIRED"} == statuses(both)


def test_a_key_for_one_gate_reactivates_the_agent_there_and_leaves_the_other_stopped(both: Bed) -> None:
    assert 200 == moved(both, "suspend").status_code
    key = both.key_for("ada", ("operate", "read"), ("ferry",))
    answer = moved(both, "reactivate", key)
    assert (200, "ferry", "ACTIVE") == (
        answer.status_code,
        answer.json()["gate"],
        answer.json()["agent"]["status"],
    )
    assert {"toll": "SUSPENDED", "ferry": "ACTIVE"} == statuses(both)
    assert 409 == moved(both, "reactivate", key).status_code
    done = moved(both, "suspend", key)  # the agent decides nowhere then
    assert (200, "ferry") == (done.status_code, done.json()["gate"])


def test_a_gate_that_fails_keeps_no_other_from_being_stopped_and_the_same_request_moves_it_later(
    both: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    toll, transition = both.gate.store, registry.transition

    def failing(store: Any, *given: Any, **named: Any) -> None:
        if store is toll:
            raise StoreError("the record cannot be written: disk full")
        transition(store, *given, **named)

    monkeypatch.setattr(registry, "transition", failing)
    failed = check(moved(both, "suspend"), 503, "STORE_UNAVAILABLE")
    assert "is not SUSPENDED at `toll` (the record cannot be written: disk full); it is at `ferry`" in failed["detail"]
    assert {"toll": "ACTIVE", "ferry": "SUSPENDED"} == statuses(both)
    monkeypatch.setattr(registry, "transition", transition)
    answer = moved(both, "suspend")
    assert (200, "toll", "SUSPENDED") == (answer.status_code, answer.json()["gate"], answer.json()["agent"]["status"])
    assert {"toll": "SUSPENDED", "ferry": "SUSPENDED"} == statuses(both)


def test_a_gate_that_refuses_the_move_is_named(both: Bed) -> None:
    ferry = both.service.gates["ferry"].gate.store
    registry.transition(ferry, "toll-agent", "ESCALATED", by="runtime", reason="one case", now_ms=both.clock())
    refused = check(moved(both, "suspend"), 409, "CONFLICT")
    assert "`ferry` (operator may not move agent `toll-agent` from ESCALATED to SUSPENDED)" in refused["detail"]
    assert {"toll": "SUSPENDED", "ferry": "ESCALATED"} == statuses(both)


def test_one_agent_of_two_gates_is_shown_where_it_is_still_active(both: Bed) -> None:
    key = both.key_for("ada", ("operate", "read"), ("toll",))
    assert 403 == moved(both, "suspend", key).status_code
    shown = both.client.get(AGENT).json()
    assert ("ferry", "ACTIVE") == (shown["gate"], shown["agent"]["status"])
    mine = both.client.get(AGENT, headers={"Authorization": f"Bearer {key}"}).json()
    assert ("toll", "SUSPENDED") == (mine["gate"], mine["agent"]["status"])


def test_a_key_for_no_gate_of_the_service_is_not_told_that_it_halted_something(bed: Bed) -> None:
    key = bed.key_for("ada", ("operate",), ("fraud",))
    answer = bed.client.put(
        "/v1/halt", headers={"Authorization": f"Bearer {key}"}, json={"halted": True, "reason": "stop"}
    )
    check(answer, 403, "GATE_FORBIDDEN")
    assert not bed.gate.store.halted

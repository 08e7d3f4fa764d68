"""Both clients against the service itself, in process: what one writes the other reads, whatever is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from sds.client import AsyncDecisionClient, Changed, DecisionClient
from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import UsageError
from tests.client.live import served
from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.service.testbed import EVENT, Bed, opened_bed

URL = "https://testserver"
T = TypeVar("T")


def client_of(bed: Bed, key: str = "") -> DecisionClient:
    return DecisionClient(URL, key or bed.key, transport=bed.client._transport)


def awaited(bed: Bed, ask: Callable[[AsyncDecisionClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AsyncDecisionClient(URL, bed.key, transport=httpx2.ASGITransport(bed.app)) as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.fixture
def asking(home: Path) -> Iterator[Bed]:
    """A service whose model hands every case over to a human."""
    with opened_bed(home, Says(proposal("ESCALATE", "HUMAN_REVIEW"), Decoding("says", 0.75))) as made:
        yield made


def test_changes_are_followed_from_the_first_and_behind_one_that_was_seen(bed: Bed) -> None:
    dfids = [bed.post({**EVENT, "trip_id": f"T-{n}"}).json()["dfid"] for n in range(2)]

    async def second(address: str, first: Changed) -> Changed:
        async with AsyncDecisionClient(address, bed.key) as client:
            changes = client.events(first.id)
            found = await anext(changes)
            await changes.aclose()
            return found

    with served(bed) as address, DecisionClient(address, bed.key) as client:
        changes = client.events("toll:0")
        found = list(islice(changes, 4))
        changes.close()
        assert asyncio.run(second(address, found[0])) == found[1]
    assert set(dfids) >= {change.data["dfid"] for change in found if "dfid" in change.data} >= {dfids[0]}
    assert all(change.id.startswith("toll:") for change in found)


def test_a_decision_over_http_is_that_of_the_gate(bed: Bed) -> None:
    with client_of(bed) as client:
        answer = client.decide("toll", EVENT)
        assert answer == client.decide("toll", EVENT)
    assert "SUCCESS" == answer.execution
    assert answer == bed.gate.decide(EVENT)
    assert answer == awaited(bed, lambda client: client.decide("toll", EVENT))


def test_the_services_errors_are_raised_with_their_codes(bed: Bed) -> None:
    cases: dict[str, Callable[[DecisionClient], Any]] = {
        "GATE_UNKNOWN": lambda client: client.decide("tool", EVENT),
        "EVENT_INVALID": lambda client: client.decide("toll", b"{"),
        "DFID_UNKNOWN": lambda client: client.case("019a"),
        "USAGE": lambda client: client.escalations(limit=0),
    }
    with client_of(bed) as client:
        for code, ask in cases.items():
            with pytest.raises(UsageError) as caught:
                ask(client)
            assert code == caught.value.reason_code
            assert caught.value.hint
    with client_of(bed, "sds_wrong") as client, pytest.raises(UsageError) as caught:
        client.gates()
    assert "UNAUTHENTICATED" == caught.value.reason_code


def test_another_body_of_an_event_names_the_decision_of_the_first(bed: Bed) -> None:
    with client_of(bed) as client:
        first = client.decide("toll", EVENT)
        with pytest.raises(UsageError) as caught:
            client.decide("toll", {**EVENT, "text": "Another."})
    assert ("EVENT_CONFLICT", first.dfid) == (caught.value.reason_code, caught.value.dfid)


def test_gates_say_what_they_take(bed: Bed) -> None:
    (gate,) = awaited(bed, lambda client: client.gates())
    assert ("toll", "trip_id") == (gate["gate"], gate["event"]["id"])


def test_a_case_is_looked_at_and_resolved_once(asking: Bed) -> None:
    with client_of(asking) as client:
        dfid = client.decide("toll", EVENT).dfid
        assert [dfid] == [case["dfid"] for case in client.escalations(gate="toll")]
        assert dfid == client.case(dfid)["dfid"]
        change = '{"action": "WAIVE", "params": {"amount": 1.00}, "reason": "EMERGENCY"}'
        answer = client.resolve(dfid, "MODIFY", reason="seen the papers", change=change, acknowledge=True)
        assert ("MODIFY", {"amount": 100}) == (answer.resolution, answer.params)
        assert (answer.resolved_by or "").startswith("everything")
        assert [] == list(client.escalations())
        with pytest.raises(UsageError):
            client.resolve(dfid, "ABORT", reason="again")


def test_all_cases_are_listed_in_as_many_pages_as_are_needed(asking: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sds.client.calls.CASES_OF_PAGE", 2)
    with client_of(asking) as client:
        dfids = [client.decide("toll", EVENT | {"trip_id": f"T-{number}"}).dfid for number in range(5)]
        listed = [case["dfid"] for case in client.escalations()]
        assert sorted(dfids) == sorted(listed)
        assert listed[:3] == [case["dfid"] for case in client.escalations(limit=3)]
        assert 5 == len(awaited(asking, lambda client: client.escalations(gate="toll")))


def test_a_case_is_resolved_from_an_event_loop_too(asking: Bed) -> None:
    async def run(client: AsyncDecisionClient) -> str | None:
        answer = await client.decide("toll", EVENT)
        assert 1 == len(await client.escalations())
        assert answer.dfid == (await client.case(answer.dfid))["dfid"]
        return (await client.resolve(answer.dfid, "ABORT", reason="withdrawn")).tag

    assert "HUMAN_ABORTED" == awaited(asking, run)


@pytest.mark.parametrize("change", ["{", "[1]", "1", {"action": "VOUCHER"}])
def test_a_change_that_is_no_object_is_refused_before_it_is_sent(change: Any, bed: Bed) -> None:
    with client_of(bed) as client, pytest.raises(UsageError, match="`change` must be a JSON object"):
        client.resolve("019a", "MODIFY", reason="why not", change=change)


def test_a_gate_is_halted_and_resumed(bed: Bed) -> None:
    with client_of(bed) as client:
        assert [True] == [gate["halted"] for gate in client.halt(reason="a storm", gate="toll")]
        assert [True] == [gate["halted"] for gate in awaited(bed, lambda other: other.halted())]
        assert [False] == [gate["halted"] for gate in awaited(bed, lambda other: other.resume(reason="over"))]
        assert [False] == [gate["halted"] for gate in client.halted()]
    assert [False] == [gate["halted"] for gate in awaited(bed, lambda other: other.resume(reason="over", gate="toll"))]


def test_an_agent_is_suspended_and_reactivated(bed: Bed) -> None:
    with client_of(bed) as client:
        client.move_agent("toll-agent", "suspend", reason="looks odd")
        (agent,) = client.agents()
        assert "SUSPENDED" == agent["status"]
        awaited(bed, lambda other: other.move_agent("toll-agent", "reactivate", reason="was not"))
        (agent,) = awaited(bed, lambda other: other.agents())
        assert "ACTIVE" == agent["status"]


def test_a_decision_is_looked_at_and_listed_over_pages(bed: Bed) -> None:
    with client_of(bed) as client:
        made = [client.decide("toll", {**EVENT, "trip_id": f"T-{n}", "car_id": "CAR-1"}) for n in range(60)]
        listed = list(client.decisions(gate="toll"))
        assert {answer.dfid for answer in made} == {each["dfid"] for each in listed}
        assert len(made) == len(listed)
        assert client.get(made[0].dfid) == made[0]
        assert made[0].dfid == client.audit(made[0].dfid)["decision"]["dfid"]
        assert [made[0].dfid] == [each["dfid"] for each in client.orders("toll")]
        assert [] == list(client.orders("toll", until_ms=1))
        assert [] == list(client.decisions(state="EXECUTING"))
        assert [] == list(client.decisions(since_ms=1 << 50)) == list(client.decisions(until_ms=1))

    async def run(other: AsyncDecisionClient) -> tuple[int, int, str]:
        orders = [each async for each in other.orders("toll")]
        return len([each async for each in other.decisions()]), len(orders), (await other.get(made[0].dfid)).state

    assert (60, 1, "CLOSED") == awaited(bed, run)


def test_what_is_only_taken_is_decided_all_the_same(bed: Bed) -> None:
    with client_of(bed) as client:
        taken = client.submit("toll", EVENT)
        assert taken.dfid == client.decide("toll", EVENT).dfid
        assert "CLOSED" == client.get(taken.dfid).state

"""What `POST /v1/gates/{gate}/decisions` answers."""

from __future__ import annotations

from tests.service.testbed import Bed


def test_an_event_is_decided_once_and_the_same_again_gives_the_stored_answer(bed: Bed) -> None:
    first, second = bed.post(), bed.post()
    assert (200, 200) == (first.status_code, second.status_code)
    assert "WAIVE" == first.json()["action"]
    assert first.json() == second.json()
    assert 1 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


def test_who_has_no_key_is_refused_with_a_problem(bed: Bed) -> None:
    refused = bed.post(headers={"Authorization": ""})
    assert 401 == refused.status_code
    assert "application/problem+json" == refused.headers["content-type"]
    assert "UNAUTHENTICATED" == refused.json()["reason_code"]
    assert "Bearer" == refused.headers["www-authenticate"]

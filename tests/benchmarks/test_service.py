"""The question `service`: decisions in process and over HTTP are the same ones. Its figures are not tested."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sds.benchmarks import service
from sds.kernel.errors import SdsError
from sds.service.server.serving import bound
from tests.questions import asked


def test_the_same_decisions_are_compared_and_a_duplicate_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WARM_UP", 1)
    report, said = asked(service, "--n", "3", "--folder", str(tmp_path))
    assert said[0].startswith("Measure what HTTP adds") or "predicted: HTTP adds 1.0 ms" in " ".join(said)
    assert (3, 3, "refund") == (report["same"], report["n"], report["gate"])
    assert {3} == {report[name]["n"] for name in ("in_process_ms", "http_ms", "added_ms", "client_ms")}
    assert {"http", "in_process"} == report["duplicate_ms"].keys()
    assert {"added_ms", "duplicate_ms"} == report["predicted"].keys()
    assert [] == list(tmp_path.iterdir())


def test_what_is_decided_otherwise_is_not_the_same() -> None:
    def decided(state: str) -> Mapping[str, Any]:
        return {"dfid": "019a", "state": state, "action": "DENY", "params": {}}

    events = [{"n": n} for n in range(service.WARM_UP + 4)]
    _, _, same = service.in_pairs(
        events, lambda _: decided("CLOSED"), lambda e: decided("CLOSED" if e["n"] % 2 else "ABORTED")
    )
    assert 2 == same


def test_each_way_is_the_first_of_a_pair_in_turn() -> None:
    asked_in_order = list[str]()

    def way(name: str) -> service.Decide:
        def decide(_: Mapping[str, object]) -> Mapping[str, Any]:
            asked_in_order.append(name)
            return dict.fromkeys(service.COMPARED)

        return decide

    service.in_pairs([{}] * 3, way("a"), way("b"))
    assert list("abbaab") == asked_in_order


def test_a_service_that_does_not_start_is_told_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(SdsError, match="the service did not start: there is no gate `no_gate`") as caught,
        service.served("no_gate", tmp_path),
    ):
        pass
    assert caught.value.hint


def test_a_connection_of_the_service_waits_for_no_acknowledgement() -> None:
    """The event loop sets TCP_NODELAY where the socket says its protocol: without it a kept connection answers in 40 ms."""
    with bound("127.0.0.1", 0) as listener:
        assert socket.IPPROTO_TCP == listener.proto

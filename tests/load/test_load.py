"""A service that is offered more than it can decide says so, and hands nothing to a human for want of a turn."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.load.__main__ import Load, measure
from tests.load.offering import Offer, Outcome, at_a_rate, one_by_one, queue_of
from tests.load.promises import broken, grown, held, summed_up, weighed
from tests.load.wire import LOST, Pool
from tests.scale import scale

EVENTS = [{"n": n} for n in range(400)]


@pytest.mark.timeout(scale(300, 3_600))
@pytest.mark.parametrize(("rate", "seconds"), [("10x", 60), ("10x", 600)] if scale(0, 1) else [("3x", 2)])
def test_under_many_times_its_capacity_a_service_stays_honest(rate: str, seconds: float) -> None:
    """How long it takes there says nothing here: the machine is shared. That memory is flat shows in a long load alone."""
    report = measure(Load("scripted", rate, seconds=seconds, unloaded=10, warm_up=5, capacity_s=1.0))
    print(json.dumps(report))
    assert [] == [*held(report), *(grown(report["memory_mib"]) if scale(0, 1) else ())]
    assert {state.partition(":")[0] for state in report["loaded"]["states"]} <= {"CLOSED", "ABORTED"}
    assert report["memory_mib"]["end"] > 0


def test_what_is_no_rate_is_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "tests.load", "--rate", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 2 == done.returncode
    assert "`fast` is neither a number a second nor, as 10x, times the capacity" in done.stderr


GOOD = {
    "unloaded_ms": {"p99": 50.0},
    "loaded": {"accepted_ms": {"p99": 100.0}, "refused_ms": {"p99": 20.0}, "answers": {"200": 5, "503": 9, "504": 1}},
    "memory_mib": {"begin": 200.0, "end": 216.0},
    "agents": {"toll-agent": "ACTIVE"},
    "escalated_for_a_turn": 0,
}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"loaded": {"accepted_ms": {"p99": 100.1}}}, "accepted: p99 100.1 ms, over 2 x the 50.0 ms"),
    "late refusals": ({"loaded": {"refused_ms": {"p99": 20.1}}}, "refused: p99 20.1 ms, over 20"),
    "nothing refused": ({"loaded": {"refused_ms": None}}, "nothing was accepted, or nothing refused"),
    "faults": ({"loaded": {"answers": {"200": 5, "500": 1}}}, "answers of another kind: {'500': 1}"),
    "lost": ({"loaded": {"answers": {"0": 1}}}, "answers of another kind: {'0': 1}"),
    "escalations": ({"escalated_for_a_turn": 2}, "2 cases went to a human for want of a turn"),
    "agent": ({"agents": {"toll-agent": "SUSPENDED"}}, "agents are not ACTIVE: {'toll-agent': 'SUSPENDED'}"),
    "memory": ({"memory_mib": {"begin": 200.0, "end": 216.1}}, "memory grew from 200.0 to 216.1 MiB"),
}


def test_a_leak_shows_as_what_memory_grows_by_a_minute_and_what_a_service_takes_to_begin_with_does_not() -> None:
    flat = [100.0, 150.0, *[200.0] * 6]
    assert {"begin": 200.0, "end": 200.0, "most": 200.0, "grows_a_minute": 0.0} == weighed(flat, 60.0)
    leaks = [100.0, 200.0, *[202.0 + 2 * n for n in range(6)]]
    assert {"begin": 202.0, "end": 212.0, "most": 212.0, "grows_a_minute": 16.0} == weighed(leaks, 60.0)


def test_a_run_that_keeps_every_promise_has_none_broken() -> None:
    assert [] == broken(GOOD)


@pytest.mark.parametrize(("changed", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_each_promise_that_is_not_kept_is_said(changed: dict[str, Any], said: str) -> None:
    report = {**GOOD, **changed, "loaded": {**GOOD["loaded"], **changed.get("loaded", {})}}  # type: ignore[dict-item]
    (line,) = broken(report)
    assert line.startswith(said)


Answer = Callable[[int], bytes]


def answer(status: int, data: object) -> bytes:
    body = json.dumps(data).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nRetry-After: 1\r\n\r\n" % (status, len(body)) + body


def decided(n: int) -> bytes:
    return answer(200, {"state": "CLOSED", "reason_code": None, "tag": None})


async def offered(
    answers: Answer, ask: Callable[[Offer], Any], delay_s: float = 0.0, most: int = 8
) -> tuple[Offer, Any]:
    """Serve answers by their number, the bytes in two parts, and run `ask` against it."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                await asyncio.sleep(delay_s)
                said, seen = answers(seen), seen + 1
                if not said:
                    break
                writer.write(said[:20])
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(said[20:])
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(*server.sockets[0].getsockname()[:2], most)
    offer = Offer(pool, "/v1/gates/toll/decisions", "sds_key", queue_of(EVENTS))
    try:
        return offer, await ask(offer)
    finally:
        pool.close()
        await asyncio.sleep(0)
        server.close()


def test_latency_counts_from_the_intended_moment() -> None:
    """One connection and 50 ms an answer: of 100 a second each waits for those before it, and that is not left out."""
    outcomes: list[Outcome]
    _, outcomes = asyncio.run(
        offered(decided, lambda offer: at_a_rate(offer, 100.0, 0.3, 1_000, Random(1)), delay_s=0.05, most=1)
    )
    assert len(outcomes) > 10
    assert max(outcome.latency_ms for outcome in outcomes) > 50 * len(outcomes) * 0.5
    assert max(outcome.lag_ms for outcome in outcomes) < 500


def test_what_is_refused_is_offered_again_and_what_is_decided_is_not() -> None:
    def answers(n: int) -> bytes:
        return decided(n) if n % 2 else answer(503, {"reason_code": "OVERLOADED"})

    offer, outcomes = asyncio.run(offered(answers, lambda offer: one_by_one(offer, 10)))
    assert len(EVENTS) - 5 == len(offer.events)
    said = summed_up(outcomes)
    assert ({"200": 5, "503": 5}, {"OVERLOADED": 5}) == (said["answers"], said["reason_codes"])
    assert (5, 5) == (said["accepted_ms"]["n"], said["refused_ms"]["n"])


def test_a_connection_that_breaks_is_counted_and_the_next_is_another() -> None:
    _, outcomes = asyncio.run(offered(lambda n: decided(n) if n else b"", lambda offer: one_by_one(offer, 2)))
    assert [LOST, 200] == [outcome.status for outcome in outcomes]

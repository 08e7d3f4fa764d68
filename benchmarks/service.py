"""Measure what HTTP adds to a decision: `sds bench service --json`.

    in_process_ms   `Gate.decide`, from the event to the answer
    http_ms         the same events sent to `sds serve` on this machine, over one bare socket that stays open, each in one
                    write; writing the event's JSON and reading the answer's are included
    added_ms        `http_ms` less `in_process_ms`, event by event; `p50s`: the difference of the two medians
    client_ms       other events by `sds.client`, with an idempotency key, which the service stores before and after
    duplicate_ms    events that were decided before: over HTTP, and in process
    same            the number of pairs with equal answers; where it is not all of them, the times do not compare

Each event is decided twice, in two records over the same world, one right after the other; which comes first alternates.
The first 16 (`WARM_UP`) of each measurement do not count. One request is sent at a time: `python -m tests.load` measures a
service under load. The service runs in a process of its own, with readers and executor of its own. Orders of a gate of your
own are settled by a stand-in.

Predicted before measuring: HTTP adds 1.0 ms at most, and a duplicate takes 2.0 ms at most. With `http.client`, which was
used at first, HTTP added more: that client sends head and body in two writes, and the service reads twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, summary, versions, whole_number
from sds.benchmarks.lib.orders import argument_of, without_orders
from sds.client import DecisionClient
from sds.definitions.definition import DEFAULT, GateDefinition
from sds.definitions.registry import find
from sds.gate import Gate
from sds.kernel.errors import SdsError, UsageError
from sds.models.protocol import extra_hint

N, N_MAX, WARM_UP = 300, 5_000, 16
COMPARED = ("dfid", "state", "action", "params")
PREDICTED = {"added_ms": 1.0, "duplicate_ms": 2.0}
STARTED_S_MAX, ENDED_S_MAX = 120.0, 60.0
START = ("-c", "from sds.cli import main; main()", "serve")
_REPLY = re.compile(rb"HTTP/1.1 (\d+) .*?\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n", re.DOTALL)
_ADDRESS, _KEY = re.compile(r"serving .* at http://([^:\s]+):(\d+)"), re.compile(r"sds_[A-Za-z0-9_-]{43}")

Event = Mapping[str, object]
Decide = Callable[[Event], Mapping[str, Any]]


@contextmanager
def served(gate: str, home: Path, start: Sequence[str] = START, **given: str) -> Iterator[tuple[str, int, str, int]]:
    """Run `sds serve` for a gate in a home folder; yield host, port, a key and the process id. `start`: Python's arguments
    before those of `serve`; `given`: more environment variables; SDS_STORE is unset. Raises SdsError where it does not start.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SDS_STORE"}
    environment |= {"SDS_HOME": str(home), **given}
    command = [sys.executable, *start, "--gate", gate, "--port", "0", "--dev", "--rate", "1000000"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)  # noqa: S603  our own module
        try:
            yield *_started(process, said.fileno()), process.pid
        finally:
            process.terminate()
            try:
                process.wait(ENDED_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _started(process: subprocess.Popen[bytes], said: int) -> tuple[str, int, str]:
    ends_s, text = time.monotonic() + STARTED_S_MAX, ""
    while time.monotonic() < ends_s:
        ended, text = process.poll() is not None, os.pread(said, 1 << 16, 0).decode()
        if (at := _ADDRESS.search(text)) and (key := _KEY.search(text)):
            return at[1], int(at[2]), key[0]
        if ended:
            break
        time.sleep(0.05)
    why = next((line for line in text.splitlines() if line.startswith("error:")), "it printed nothing")
    raise SdsError(f"the service did not start: {why.removeprefix('error: ')}", hint=extra_hint("service"))


def over_http(connection: socket.socket, gate: str, key: str) -> Decide:
    """Return a function that decides an event by one request, in one write, on a connection that stays open."""
    asked = f"POST /v1/gates/{gate}/decisions HTTP/1.1\r\nHost: service\r\nAuthorization: Bearer {key}\r\n"
    head = f"{asked}Content-Type: application/json\r\nContent-Length: ".encode()

    def decide(event: Event) -> Mapping[str, Any]:
        body, got = json.dumps(event).encode(), b""
        connection.sendall(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        while (reply := _REPLY.match(got)) is None or len(got) < reply.end() + int(reply[2]):
            got += (part := connection.recv(1 << 16))
            if not part:
                raise SdsError("the service closed the connection")
        if reply[1] != b"200":
            raise SdsError(f"the service answered {reply[1].decode()}: {got[reply.end() :].decode(errors='replace')}")
        return dict[str, Any](json.loads(got[reply.end() :]))

    return decide


def in_pairs(events: Sequence[Event], one: Decide, other: Decide) -> tuple[list[float], list[float], int]:
    """Decide each event both ways, each way first in turn; return the milliseconds of each way, and the number of events
    with equal answers. The first `WARM_UP` do not count.
    """
    took_ms: tuple[list[float], list[float]] = ([], [])
    same = list[bool]()
    for event, first in zip(events, cycle((0, 1)), strict=False):
        answers = dict[int, Mapping[str, Any]]()
        for way in (first, 1 - first):
            began = time.perf_counter()
            answers[way] = (one, other)[way](event)
            took_ms[way].append((time.perf_counter() - began) * 1000)
        same.append(all(answers[0][name] == answers[1][name] for name in COMPARED))
    return took_ms[0][WARM_UP:], took_ms[1][WARM_UP:], sum(same[WARM_UP:])


def timed(events: Sequence[Event], decide: Decide) -> list[float]:
    """Return the milliseconds that each event takes."""
    took_ms = list[float]()
    for event in events:
        began = time.perf_counter()
        decide(event)
        took_ms.append((time.perf_counter() - began) * 1000)
    return took_ms


def run(definition: GateDefinition, folder: Path, n: int) -> Report:
    """Measure in two new homes below `folder`. Raises UsageError where the gate's queue is too short."""
    events = [case.event for case in definition.cases(folder / "in_process")]
    if len(events) < 2 * (WARM_UP + n):
        raise UsageError(
            f"{2 * (WARM_UP + n)} events are needed, and the queue has {len(events)}", hint="choose a smaller --n"
        )
    paired, others = events[: WARM_UP + n], events[WARM_UP + n : 2 * (WARM_UP + n)]
    with ExitStack() as opened:
        gate = opened.enter_context(Gate.load(without_orders(definition), folder=folder / "in_process"))
        argument = argument_of(definition, folder / "gate")
        host, port, key, _ = opened.enter_context(served(argument, folder / "served"))
        connection = opened.enter_context(socket.create_connection((host, port), STARTED_S_MAX))
        client = opened.enter_context(DecisionClient(f"http://{host}:{port}", key))

        def in_process(event: Event) -> Mapping[str, Any]:
            return gate.decide(event).as_data()

        http = over_http(connection, gate.contract.gate, key)
        alone, asked, same = in_pairs(paired, in_process, http)
        again = {"http": timed(paired, http)[WARM_UP:], "in_process": timed(paired, in_process)[WARM_UP:]}
        by_client = timed(others, lambda event: client.decide(gate.contract.gate, event).as_data())[WARM_UP:]
    added = [asked_ms - alone_ms for asked_ms, alone_ms in zip(asked, alone, strict=True)]
    of_p50s = round(summary(asked)["p50"] - summary(alone)["p50"], 2)
    return {
        "benchmark": "service",
        **machine(),
        "n": n,
        "gate": definition.name,
        "model": gate.engine.model,
        "versions": versions("uvicorn", "uvloop", "httptools", "starlette", "httpx2", "SQLAlchemy"),
        "in_process_ms": summary(alone),
        "http_ms": summary(asked),
        "added_ms": {**summary(added), "p50s": of_p50s},
        "client_ms": summary(by_client),
        "duplicate_ms": {name: summary(took_ms) for name, took_ms in again.items()},
        "same": same,
        "predicted": PREDICTED,
    }


def _options(parser: Parser) -> None:
    parser.add_argument("--gate", default=DEFAULT, help="which gate: its name, or its path")
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="how many decisions of each sort")
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    say(
        f"predicted: HTTP adds {PREDICTED['added_ms']} ms at most, a duplicate takes {PREDICTED['duplicate_ms']} ms at most"
    )
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(find(asked.gate), Path(folder).resolve(), asked.n)


def _show(report: Report) -> None:
    print(f"{report['gate']}: in process {report['in_process_ms']} ms, over HTTP {report['http_ms']} ms")
    print(f"added: {report['added_ms']} ms; the same answer in {report['same']} of {report['n']}")
    print(f"by sds.client, with a key: {report['client_ms']} ms")
    print(f"duplicates: {report['duplicate_ms']} ms")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)

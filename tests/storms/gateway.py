"""A payment gateway in its own process (`sds sandbox-gateway`) that loses replies, and later forgets its keys.

Payments are counted in the gateway's books, by account: each event has its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2

from sds.executors.http import HttpExecutor, parse_gateway
from tests.attack.figures import Figure, every, measured, none
from tests.attack.forks import in_child, in_children
from tests.attack.testbed import Testbed, contract, fates, settle

from .ground import CALM_MS, Ground, bed_of, decide, faults

LOST = "a gateway loses, cuts and repeats its replies, and orders on their way, to 3 processes"
FORGETFUL = "a gateway loses replies, and has forgotten all keys when its orders are asked about"
PROCESSES = 3
MISFORTUNES = {"lose-replies": 0.2, "cut-replies": 0.1, "drop": 0.1, "fail": 0.1, "answer-twice": 0.1, "delay-ms": 2}
DISPATCH_MS = 1_000
DAY_MS = 86_400_000
ENDED_S = 30.0
SENT_AGAIN = 3  # times that all events are sent again


class Gateway:
    """A running gateway, as a storm asks it, not through the executor."""

    def __init__(self, url: str) -> None:
        self.url = url

    def misbehave(self, **how: float) -> None:
        wanted = {name.replace("_", "-"): value for name, value in how.items()}
        with httpx2.Client(trust_env=False) as client:
            assert 200 == client.post(f"{self.url}/faults", json=wanted).status_code

    def paid(self) -> Counter[str]:
        """Return how often each account was paid."""
        with httpx2.Client(trust_env=False) as client:
            totals: dict[str, Any] = client.get(f"{self.url}/payments").json()
        counted = Counter[str]()
        for each in totals["payments"]:
            counted[each["order"]["account"]] += each["paid"]
        return counted


@contextmanager
def gateway(folder: Path, seed: int) -> Iterator[Gateway]:
    faults = ",".join(f"{name}={value}" for name, value in {**MISFORTUNES, "seed": seed}.items())
    command = [sys.executable, "-m", "sds.cli.app", "sandbox-gateway", "--file", str(folder / "gateway.db")]
    with subprocess.Popen([*command, "--faults", faults], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            yield Gateway(str(json.loads(child.stdout.readline())["url"]))
        finally:
            child.terminate()
            child.wait(ENDED_S)


@contextmanager
def executor(url: str, *, keys_kept_ms: int | None = None) -> Iterator[HttpExecutor]:
    """Open the executor of the file that ships for this gateway, without its statement, so that only keys protect."""
    form = files("sds.executors.http").joinpath("sandbox.yaml").read_text()
    form = form.replace("http://127.0.0.1:8099", url).split("\nstatement:")[0] + "\n"
    if keys_kept_ms is not None:
        form = form.replace("idempotent: true", f"keys_kept_ms: {keys_kept_ms}\nidempotent: true")
    with closing(HttpExecutor(parse_gateway(form), Path())) as made:
        yield made


def lost_replies(ground: Ground) -> list[Figure]:
    with gateway(ground.folder, ground.rng.randrange(1 << 30)) as outside:
        bed = _decided(ground, outside)
        unlucky = in_child(partial(_unknown, bed, outside.url))
        outside.misbehave()
        bed.clock.ahead_ms += CALM_MS
        found, wrong = in_child(partial(_sent_again, bed, outside.url, ground.n))
        paid = outside.paid()
    return [
        measured("orders whose end was not known at first", unlucky),
        every("accounts paid exactly once", sum(times == 1 for times in paid.values()), ground.n),
        none("accounts paid twice", sum(times > 1 for times in paid.values())),
        every("events decided", found["decided"], ground.n),
        none("faults of the record", wrong),
    ]


def forgetful(ground: Ground) -> list[Figure]:
    with gateway(ground.folder, ground.rng.randrange(1 << 30)) as outside:
        bed = _decided(ground, outside, keys_kept_ms=DAY_MS)
        unlucky = in_child(partial(_unknown, bed, outside.url, keys_kept_ms=DAY_MS))
        outside.misbehave(forget_keys_ms=1)
        bed.clock.ahead_ms += DAY_MS
        works = [partial(_sent_again, bed, outside.url, ground.n, keys_kept_ms=DAY_MS) for _ in range(PROCESSES)]
        found, wrong = in_children(works, PROCESSES)[-1]
        paid = outside.paid()
    return [
        measured("orders whose end was not known when the gateway forgot", unlucky),
        measured("accounts paid once", sum(times == 1 for times in paid.values())),
        none("accounts paid twice, after the gateway forgot, too", sum(times > 1 for times in paid.values())),
        every("events decided, or a human's", found["decided"] + found["human"], ground.n),
        none("faults of the record", wrong),
    ]


def _decided(ground: Ground, outside: Gateway, **kept: int) -> Testbed:
    bed = bed_of(ground, contract(ttl_ms=5_000, dispatch_ms=DISPATCH_MS))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    in_children(
        [partial(_decide_share, bed, outside.url, part, ground.n, **kept) for part in range(PROCESSES)], PROCESSES
    )
    return bed


def _decide_share(bed: Testbed, url: str, part: int, n: int, **kept: int) -> None:
    with executor(url, **kept) as sends, bed.gate(executor=sends) as gate:
        for number in range(part, n, PROCESSES):
            decide(gate, bed, number)


def _unknown(bed: Testbed, url: str, **kept: int) -> int:
    with executor(url, **kept) as sends, bed.gate(executor=sends) as gate:
        return int(gate.store.value("SELECT count(*) FROM execution_log WHERE status IN ('UNKNOWN', 'PENDING')"))


def _sent_again(bed: Testbed, url: str, n: int, **kept: int) -> tuple[Counter[str], int]:
    """Recover and send every event again, SENT_AGAIN times; return the events' fates and the number of faults."""
    with executor(url, **kept) as sends, bed.gate(executor=sends) as gate:
        for _ in range(SENT_AGAIN):
            gate.recover()
            for number in range(n):
                settle(gate, bed.event(number))
            bed.clock.ahead_ms += CALM_MS
        return fates(gate), faults(gate, bed)

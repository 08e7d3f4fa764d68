"""`kill -9` of real `sds serve` processes that share one record, while callers go on asking those that answer.

The gate is that of `tests.attack`, found by its path. This module, run as a program, is the whole command with the `Teller`
for a model. Now and then a process is ended by SIGTERM instead, and drains.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random, random
from typing import Self

from sds import GateDefinition
from sds.client import DecisionClient
from sds.kernel.errors import SdsError, WorldError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.attack.figures import Figure, measured, none
from tests.attack.forks import in_child
from tests.attack.kills import SlowBank
from tests.attack.outside import Accounts
from tests.attack.testbed import BALANCE_MINOR, Teller, Testbed, contract

from .ground import Bed, Ground, acknowledged_in, reckon, wait_for_an_answer

WHAT = "3 `sds serve` on one record are killed at random, while callers ask the others"
ROOT = Path(__file__).parents[2]
PROCESSES, CALLERS = 3, 6
TTL_MS = 2_000
LIFE_S_MAX = 1.0
EARLY = 0.15  # share of kills while other processes are still starting
ORDER_S_MAX = 0.15  # before an order is paid, and again before the receipt
DRAINS = 0.2  # share of processes ended by SIGTERM
REPLY_S, ENDED_S, STARTED_S = 2.0, 60.0, 120.0
GATE = """
from pathlib import Path

from tests.storms.kill_serve import definition

gate = definition(Path({folder!r}))
"""
SERVING = re.compile(r"serving \S+ at (\S+)")


class ServedBed(Bed):
    """A bed whose gate's folder is where `sds serve` has it."""

    @property
    def own(self) -> Path:
        return self.folder / "home" / self.terms.gate


class LateBank(SlowBank):
    """A slower bank, so that a killed process is probably in the middle of an order."""

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        time.sleep(random() * ORDER_S_MAX)
        receipt = super().dispatch(intent, key, deadline_s)
        time.sleep(random() * ORDER_S_MAX)
        return receipt


def definition(folder: Path) -> GateDefinition:
    """Return the gate over a bed's files, for a process that serves it."""
    bed, accounts = (
        ServedBed(folder, terms=contract(ttl_ms=TTL_MS, dispatch_ms=TTL_MS)),
        Accounts(folder / "accounts.db"),
    )
    return GateDefinition(name=bed.terms.gate, contract=bed.terms, open=lambda _: (accounts, LateBank(bed, Random())))


@dataclass
class Crowd:
    """Callers of all processes that serve. `sent`: number of events; `refused`: refusals that should not be, by code."""

    bed: Testbed
    key: str
    addresses: dict[int, str] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    refused: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=count)
    sent: int = 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._call, args=(Random(n),), daemon=True) for n in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join(ENDED_S)

    def _call(self, rng: Random) -> None:
        with ExitStack() as opened:
            client = cache(lambda address: opened.enter_context(DecisionClient(address, self.key, timeout_s=REPLY_S)))
            while not self.over.is_set():
                number = next(self.numbers)
                self.bed.accounts.put(f"A{number}", BALANCE_MINOR)
                self.sent = max(self.sent, number + 1)
                while not self._answered(number, rng, client) and not self.over.is_set():
                    time.sleep(0.01)

    def _answered(self, number: int, rng: Random, client: Callable[[str], DecisionClient]) -> bool:
        """Send an event to a process that serves; tell whether it need not be sent again."""
        addresses = [*self.addresses.values()]
        if not addresses:
            return False
        try:
            asked = client(rng.choice(addresses))
            answer = asked.decide(self.bed.terms.gate, self.bed.event(number), idempotency_key=f"E{number}")
        except WorldError as error:
            self.refused["INTERNAL"] += error.reason_code == "INTERNAL"
            return False
        except SdsError as error:
            self.refused[error.reason_code] += 1
            return True
        except Exception as error:  # noqa: BLE001  the client should raise nothing else
            self.refused[type(error).__name__] += 1
            return True
        acknowledged_in(self.bed).write(number, answer)
        return not (answer.retryable or answer.pending)


def storm(ground: Ground) -> list[Figure]:
    bed = ServedBed(ground.folder / "bed", terms=contract(ttl_ms=TTL_MS, dispatch_ms=TTL_MS))
    in_child(lambda: bed.gate().close())
    (bed.folder / "gate.py").write_text(GATE.format(folder=str(bed.folder)))
    home = {**os.environ, "SDS_HOME": str(bed.folder / "home"), "SDS_THREADS": "1", "PYTHONPATH": str(ROOT)}
    crowd = Crowd(bed, _sds(home, "keys", "add", "caller", "--role", "submit", "--gate", str(bed.folder)).strip())
    with Processes(bed.folder, home, crowd) as processes, crowd.calling():
        for _ in range(ground.n):
            processes.strike(ground.rng)
        processes.wait_until_others_serve()
    answers = len([*acknowledged_in(bed).read()])
    return [
        measured("processes killed", ground.n - processes.drained),
        measured("processes that drained", processes.drained),
        measured(f"answers to callers, of {crowd.sent} events", answers),
        none("storms in which nobody was answered", int(answers == 0)),
        none(f"refusals that nobody should get: {json.dumps(dict(+crowd.refused))}", crowd.refused.total()),
        none("processes that did not end in order when they were asked to", processes.disorderly),
        none("accounts paid twice", bed.accounts_paid_twice()),
        *reckon(bed, range(crowd.sent)),
    ]


class Processes:
    """The processes that serve. One that ends is replaced, until the block ends: then all get SIGTERM."""

    def __init__(self, folder: Path, home: dict[str, str], crowd: Crowd) -> None:
        self._folder, self._home, self._crowd = folder, home, crowd
        self._alive: dict[int, subprocess.Popen[str]] = {}
        self._numbers, self._opened = count(), ExitStack()
        self.disorderly = self.drained = 0

    def __enter__(self) -> Self:
        for _ in range(PROCESSES):
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._alive]:
            self._end(number)
        self._opened.close()

    def strike(self, rng: Random) -> None:
        """Kill a process, or have it drain, and start another in its place."""
        if rng.random() >= EARLY:
            self.wait_until_others_serve()
        wait_for_an_answer(self._crowd.bed)
        time.sleep(rng.random() * LIFE_S_MAX)
        number = rng.choice([*self._crowd.addresses] or [*self._alive])
        if rng.random() < DRAINS and number in self._crowd.addresses:
            self.drained += 1
            self._end(number)
        else:
            self._crowd.addresses.pop(number, None)
            process = self._alive.pop(number)
            process.kill()
            process.wait(ENDED_S)
        self._begin()

    def wait_until_others_serve(self) -> None:
        """Wait until all but one serve, and note their addresses. Raises RuntimeError where a process ended by itself."""
        until = time.monotonic() + STARTED_S
        while self._serving() < PROCESSES - 1 and time.monotonic() < until:
            time.sleep(0.05)

    def _serving(self) -> int:
        for number, process in self._alive.items():
            said = self._log(number).read_text()
            if process.poll() is not None:
                raise RuntimeError(f"it has ended by itself: {said}")
            if found := SERVING.search(said):
                self._crowd.addresses[number] = found[1]
        return len(self._crowd.addresses)

    def _log(self, number: int) -> Path:
        return self._folder / f"serve-{number}.log"

    def _begin(self) -> None:
        number = next(self._numbers)
        writing = self._opened.enter_context(self._log(number).open("w"))
        command = [sys.executable, "-m", __name__, "serve", "--gate", str(self._folder), "--port", "0"]
        self._alive[number] = subprocess.Popen(
            command, env=self._home, cwd=ROOT, stdout=writing, stderr=writing, text=True
        )

    def _end(self, number: int) -> None:
        """Send SIGTERM to a process; one that served is disorderly if it does not end, or not with 0."""
        served = self._crowd.addresses.pop(number, None) is not None
        process = self._alive.pop(number)
        process.terminate()
        try:
            code = process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if served and code:
            self.disorderly += 1
            print(f"  ended with {code}: {self._log(number).read_text()[-500:]}")


def _sds(home: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-m", "sds.cli.app", *args]
    return subprocess.run(command, env=home, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    from sds.cli.app import main
    from sds.service.server import serving

    serving.serve = partial(serving.serve, open_model=lambda _: Teller())
    main()

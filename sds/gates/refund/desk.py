"""Setting the refund gate up: the airline's database, the queue of claims, the payment rail, the contract.

Everything lives in one folder. The airline and the queue are made once from a seed; later runs go on where the
last one stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sds import home as places
from sds.engine import Engine
from sds.gate import Gate
from sds.gates.refund.airline import write_airline
from sds.gates.refund.claims import Cause
from sds.gates.refund.flights import load_flights
from sds.gates.refund.rail_client import RailProcess
from sds.gates.refund.source import TicketSource
from sds.gates.refund.tickets import make_world
from sds.kernel import registry
from sds.kernel.contract import Contract, load_contract
from sds.kernel.errors import StateError
from sds.kernel.executor import NoExecutor
from sds.kernel.runtime import Kernel
from sds.kernel.state import NoState
from sds.kernel.store import Store
from sds.stream import Reasoned

CONTRACT = Path(__file__).with_name("contract.yaml")
CHECKSUM = Path(__file__).with_name("contract.yaml.sha256")
SEED = 261
CLAIMS = 10_000


@dataclass(frozen=True, slots=True)
class QueuedClaim:
    """One claim waiting. `cause` is latent: for measuring agreement, never shown to model or kernel."""

    event: dict[str, str]
    cause: Cause
    injection: bool


def airline_path(folder: Path) -> Path:
    return folder / "airline.db"


def ensure_world(folder: Path, *, claims: int = CLAIMS, seed: int = SEED) -> None:
    """Make the airline and the queue of claims unless they are there."""
    if airline_path(folder).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    world = make_world(load_flights(), claims, Random(seed))  # noqa: S311  a reproducible demo, not a secret
    queue = [{**c.event, "cause": c.cause.value, "injection": c.injection} for c in world.claims]
    (folder / "claims.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queue), encoding="utf-8")
    fresh = folder / f"airline.{os.getpid()}.new"
    fresh.unlink(missing_ok=True)
    write_airline(fresh, world)
    fresh.rename(airline_path(folder))


def read_queue(folder: Path) -> list[QueuedClaim]:
    """Return every generated claim in order."""
    try:
        lines = (folder / "claims.jsonl").read_text(encoding="utf-8").splitlines()
        return [_queued(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise StateError(f"`{folder / 'claims.jsonl'}` cannot be read", hint="sds run refund --reset") from error


def _queued(line: dict[str, str]) -> QueuedClaim:
    event = {name: line[name] for name in ("claim_id", "ticket_id", "claim_text")}
    return QueuedClaim(event, Cause(line["cause"]), bool(line["injection"]))


def load_refund_contract() -> Contract:
    """Load the contract this package was released with, checked against its checksum."""
    return load_contract(CONTRACT, checksum=CHECKSUM.read_text(encoding="ascii").split()[0])


@contextmanager
def preview_kernel(folder: Path) -> Iterator[Kernel]:
    """Open a kernel that can only look: no model, no rail, nothing is executed."""
    contract = load_refund_contract()
    ensure_world(folder)
    with ExitStack() as opened:
        store = Store(places.decisions_path(folder))
        opened.callback(store.close)
        source = TicketSource(airline_path(folder))
        opened.callback(source.close)
        registry.register(store, contract, by="operator", now_ms=places.now_ms())
        yield Kernel(
            contract,
            store,
            source,
            NoExecutor(),
            places.signer(folder),
            now_ms=places.now_ms,
            new_id=places.new_id,
        )


@contextmanager
def recovery_kernel(folder: Path) -> Iterator[Kernel]:
    """Open a kernel with its payment rail but without a model: enough to learn what became of orders."""
    with preview_kernel(folder) as kernel, RailProcess(folder / "rail.db") as rail:
        yield Kernel(
            kernel.contract,
            kernel.store,
            NoState(),
            rail.executor(),
            kernel.signer,
            now_ms=places.now_ms,
            new_id=places.new_id,
        )


def open_refund(
    folder: Path,
    *,
    model: Path | None = None,
    engine: Engine | None = None,
    on_reasoned: Reasoned | None = None,
    with_rail: Callable[[RailProcess], object] = lambda _: None,
) -> Gate:
    """Open the refund gate in `folder`: it starts the payment rail's process and ends it when the gate is closed."""
    contract = load_refund_contract()
    ensure_world(folder)
    with ExitStack() as opened:
        source = TicketSource(airline_path(folder))
        opened.callback(source.close)
        rail = opened.enter_context(RailProcess(folder / "rail.db"))
        with_rail(rail)
        gate = Gate(
            contract,
            source,
            rail.executor(source.version),
            folder=folder,
            model=model,
            engine=engine,
            on_reasoned=on_reasoned,
        )
        gate.on_close(opened.pop_all().close)
    return gate

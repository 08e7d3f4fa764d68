"""The fraud gate's definition: the bank's database, the queue of payments, the holds, the contract.

Everything lies in one folder. The bank and the queue are made once from a seed; later runs continue where the last one
stopped. The queue is the test part of the generated payments: every fraud in it, and a sample of the good ones, so that
one payment in eight is fraud. Unsampled, it is about one in sixty-five.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from sds.definitions.definition import Demo, GateDefinition, QueuedCase
from sds.gates.worlds import make_once, read_lines, released_contract, tighten_files
from sds.host.clock import now_ms
from sds.kernel.contract.schema import Contract

from .adjudication import Truth, expected_kind
from .chaos import CompromisedAccount, passed_twice
from .executor import HoldExecutor
from .holds import holds_path, make_holds
from .labels import labelled, truth_of
from .rows import SEED, Row, rows
from .source import PaymentSource
from .totals import in_money
from .world.bank import bank_path, write_bank

CONTRACT = Path(__file__).with_name("contract.yaml")
GOOD_PER_FRAUD = 7
QUEUE = "payments.jsonl"


def ensure_world(folder: Path, *, seed: int = SEED) -> None:
    """Make the bank, the queue and the holds unless they exist. The first process makes them for all."""
    bank, holds = bank_path(folder), holds_path(folder)
    if bank.exists():
        tighten_files(folder / QUEUE, bank, holds)
        return
    queue = queued_rows(seed)

    def write(path: Path) -> None:
        write_bank(path, ((event_of(row, seed)["payment_id"], row.fields) for row in queue))
        make_holds(holds)

    make_once(bank, folder / QUEUE, ({**event_of(row, seed), **truth_of(row)._asdict()} for row in queue), write)


def queued_rows(seed: int) -> list[Row]:
    """Return the payments of the queue by time: every fraud of the test part, and GOOD_PER_FRAUD good ones to each."""
    every = list(rows("test", seed=seed))
    frauds, good = ([row for row in every if row.label is label] for label in (True, False))
    chosen = Random(f"{seed} queue").sample(good, min(len(good), GOOD_PER_FRAUD * len(frauds)))  # noqa: S311  no secret
    return sorted([*frauds, *chosen], key=lambda row: row.number)


def event_of(row: Row, seed: int) -> dict[str, str]:
    """Return the trigger as it arrives from outside."""
    tag = f"{row.number:06d}-{seed:x}"  # so the events of two worlds in one store do not contradict each other
    return {"request_id": f"REQ-{tag}", "payment_id": f"PAY-{tag}", "note": row.text}


def read_queue(folder: Path) -> list[QueuedCase]:
    """Return every payment of the queue in order, with the generator's truth as the label."""
    return read_lines(folder / QUEUE, _queued, gate="fraud")


def _queued(line: dict[str, str]) -> QueuedCase:
    event = {name: line[name] for name in ("request_id", "payment_id", "note")}
    return QueuedCase(event, label=Truth(line["scenario"], line["said"], int(line["amount_minor"])))


def load_fraud_contract() -> Contract:
    """Load the contract of this release, checked against its checksum."""
    return released_contract(CONTRACT)


def _source(folder: Path) -> PaymentSource:
    ensure_world(folder)
    return PaymentSource(bank_path(folder), holds_path(folder), now_ms)


def _open(folder: Path) -> tuple[PaymentSource, HoldExecutor]:
    source = _source(folder)
    return source, HoldExecutor(holds_path(folder), source.version, now_ms)


def _queue(folder: Path) -> list[QueuedCase]:
    ensure_world(folder)
    return read_queue(folder)


def _expected(case: QueuedCase) -> str:
    return expected_kind(case.fields, case.label)


gate = GateDefinition(
    name="fraud",
    contract=load_fraud_contract,
    open=_open,
    source=_source,
    events=_queue,
    expected=_expected,
    readers=Path(__file__).with_name("readers"),
    labelled=labelled,
    demo=Demo(
        case="payment",
        outcomes={"ALLOW": "allowed", "CHALLENGE": "held", "BLOCK": "blocked"},
        currency="EUR",
        executor="hold executor",
        note="Payments, customers and frauds are generated, and frauds come more often here than among all payments.",
        faults=passed_twice,
        chaos={"drift": CompromisedAccount},
        totals=in_money,
    ),
)

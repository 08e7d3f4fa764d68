"""What this gate promises. Run it with `pytest`, in this folder."""

from __future__ import annotations

from pathlib import Path

from gate import Payments, Releases, events, make_samples
from sds import ExecutionIntent, Gate


def intent(folder: Path, kind: str = "ALLOW", version: str = "1") -> ExecutionIntent:
    make_samples(folder)
    read = Payments(folder).read("PAY-001")
    assert read is not None
    amount = int(read.fields["payment.open_minor"])
    return ExecutionIntent("a-flow", "k" * 64, kind, (("amount", amount),), "PAY-001", version)


def test_the_first_event_is_decided_by_the_real_model(tmp_path: Path) -> None:
    with Gate.load(Path(__file__).parent, folder=tmp_path) as gate:
        answer = gate.decide(next(iter(events(tmp_path))))
    assert answer.state in {"CLOSED", "ESCALATED"}
    assert answer.action in {"ALLOW", "CHALLENGE", "DENY", "ESCALATE"}


def test_an_order_has_one_effect_however_often_it_is_sent(tmp_path: Path) -> None:
    order, releases = intent(tmp_path), Releases(tmp_path)
    assert releases.lookup(order.idempotency_key, 1.0).status == "absent"
    for _ in range(2):
        assert releases.dispatch(order, order.idempotency_key, 1.0).status == "settled"
    assert releases.lookup(order.idempotency_key, 1.0).status == "settled"
    read = Payments(tmp_path).read("PAY-001")
    assert read is not None
    assert (read.fields["payment.open_minor"], read.version) == (0, "2")
    assert [order.idempotency_key] == [line.key for line in releases.statement(0, 10**15)]


def test_a_payment_that_has_moved_is_not_released(tmp_path: Path) -> None:
    order, releases = intent(tmp_path, version="7"), Releases(tmp_path)
    assert releases.dispatch(order, order.idempotency_key, 1.0).status == "rejected"
    assert releases.lookup(order.idempotency_key, 1.0).status == "absent"


def test_a_stolen_card_is_never_allowed(tmp_path: Path) -> None:
    stolen = 0
    with Gate.load(Path(__file__).parent, folder=tmp_path) as gate:
        for event in events(tmp_path):
            packet = gate.preview(event)
            if packet.snapshot.fields["card.reported_stolen"]:
                stolen += 1
                assert {"DENY", "ESCALATE"} == set(packet.envelope.names)
    assert stolen

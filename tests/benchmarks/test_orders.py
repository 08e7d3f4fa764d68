"""A benchmark decides events of any gate, and sends no order of a gate of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds import Gate, ScriptedEngine, proposal
from sds.benchmarks import gate as question
from sds.benchmarks import readings, service
from sds.benchmarks.lib.orders import argument_of, without_orders
from sds.definitions.definition import GateDefinition
from sds.definitions.registry import find
from sds.kernel.errors import UsageError
from tests.gates.own import GATE, written
from tests.questions import asked

EVENT = {"trip_id": "T-1", "car_id": "CAR-1", "text": "Please."}


def waives() -> ScriptedEngine:
    return ScriptedEngine(lambda packet: proposal(packet, "WAIVE", reason="EMERGENCY", amount=100))


@pytest.fixture
def toll(tmp_path: Path) -> Path:
    """The path of a gate that leaves a file for each order it carries out, and one when it is closed."""
    code = GATE.replace(
        "        ORDERS[key] = ",
        '        __import__("pathlib").Path(__file__).with_name("paid").touch()\n        ORDERS[key] = ',
    )
    code = code.replace(
        "    def lookup",
        '    def close(self):\n        __import__("pathlib").Path(__file__).with_name("closed").touch()\n\n    def lookup',
    )
    return written(tmp_path / "toll", code)


def decided(definition: GateDefinition, folder: Path) -> str | None:
    with Gate.load(definition, folder=folder, engine=waives()) as gate:
        return gate.decide(EVENT).execution


def test_an_order_is_settled_and_not_sent(toll: Path, tmp_path: Path) -> None:
    assert "SUCCESS" == decided(without_orders(str(toll)), tmp_path / "measured")
    assert (False, True) == (toll.with_name("paid").exists(), toll.with_name("closed").exists())
    assert "SUCCESS" == decided(find(str(toll)), tmp_path / "in earnest")
    assert toll.with_name("paid").exists(), "the gate itself pays"


def test_a_gate_that_is_served_in_a_process_of_its_own_sends_none_either(toll: Path, tmp_path: Path) -> None:
    assert "SUCCESS" == decided(find(argument_of(find(str(toll)), tmp_path / "file")), tmp_path / "measured")
    assert not toll.with_name("paid").exists()


def test_the_packages_own_gates_are_measured_with_their_executors(tmp_path: Path) -> None:
    refund = find("refund")
    assert refund is without_orders("refund")
    assert "refund" == argument_of(refund, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_each_question_about_any_gate_sends_none(toll: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "open_engine", lambda *_, **__: waives())
    assert 2 == question.run(str(toll), tmp_path / "gate", None, 2)["outcomes"]["waive"]
    opened = list[GateDefinition]()

    def stop(definition: GateDefinition, *_: object, **__: object) -> Gate:
        opened.append(definition)
        raise UsageError("seen")

    monkeypatch.setattr(Gate, "load", stop)
    monkeypatch.setattr(service, "WARM_UP", 0)
    monkeypatch.setattr(readings, "run", stop)
    for module in (service, readings):
        with pytest.raises(SystemExit):
            asked(module, "--gate", str(toll), "--n", "1", "--folder", str(tmp_path))
    assert ["StandIn"] * 2 == [type(each.open(tmp_path)[1]).__name__ for each in opened]
    assert not toll.with_name("paid").exists()

"""The gates of one process: opened once, one model for all that read with it, closed together."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sds.host import paths
from sds.host.clock import now_ms
from sds.kernel.errors import ContractError, ModelError, UsageError
from sds.service.gates import OpenGates, open_gates
from sds.service.settings import ServiceSettings
from tests.gates.own import GATE, written
from tests.proposers import Greedy
from tests.service.testbed import EVENT


class Counted(Greedy):
    """Counts how often it is opened and closed."""

    def __init__(self) -> None:
        super().__init__("WAIVE")
        self.opened = self.closed = 0

    def open(self) -> Counted:
        self.opened += 1
        return self

    def close(self) -> None:
        self.closed += 1


def gates_of(home: Path, *names: str) -> ServiceSettings:
    paths = [written(home / name, GATE.replace("toll", name)).parent for name in names]
    return ServiceSettings(gates=tuple(map(str, paths)))


def opened(settings: ServiceSettings, model: Counted) -> OpenGates:
    return open_gates(settings, open_model=model.open, now_ms=now_ms)


def test_gates_that_read_with_the_same_model_share_one_and_it_is_closed_once(home: Path) -> None:
    model = Counted()
    gates = opened(gates_of(home, "bridge", "tunnel"), model)
    assert ["bridge", "tunnel"] == list(gates)
    assert (1, 0) == (model.opened, model.closed)
    assert ["CLOSED", "CLOSED"] == [each.gate.decide(EVENT).state for each in gates.values()]
    gates.close()
    assert (1, 1) == (model.opened, model.closed)


def test_a_gate_whose_policy_has_fitted_readers_opens_no_model(home: Path) -> None:
    model = Counted()
    gates = opened(ServiceSettings(gates=("refund",)), model)
    assert 0 == model.opened
    gates.close()


def test_a_gate_that_is_named_twice_is_refused_before_anything_is_opened(home: Path) -> None:
    settings, model = gates_of(home, "bridge"), Counted()
    with pytest.raises(UsageError, match=r"the gate `[a-z]+` is named twice"):
        opened(ServiceSettings(gates=settings.gates * 2), model)
    assert 0 == model.opened


@pytest.mark.sqlite_alone("a folder stands in the place of a record's file")
def test_what_was_opened_is_closed_where_the_next_does_not_open(home: Path) -> None:
    settings, model = gates_of(home, "bridge", "tunnel"), Counted()
    (home / "tunnel" / "decisions.db").mkdir()
    with pytest.raises(Exception, match="cannot be opened"):
        opened(settings, model)
    assert 1 == model.closed


def test_no_contract_is_put_in_force_before_the_engines_of_all_gates_are_open(home: Path) -> None:
    """Otherwise the processes that decide under the older contract refuse events for as long as the next gate's takes to open."""
    settings = ServiceSettings(gates=("refund", *gates_of(home, "bridge").gates))

    def fails() -> Counted:
        assert not paths.has_record(home / "refund")
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        open_gates(settings, open_model=fails, now_ms=now_ms)
    assert not paths.has_record(home / "refund")


def test_a_gate_that_is_refused_keeps_the_contract_of_no_other_gate_from_those_that_serve(home: Path) -> None:
    """Otherwise nobody decides for the other gate: processes with its older contract stop, and this one does not start."""
    settings = gates_of(home, "bridge", "tunnel")
    opened(settings, Counted()).close()
    raised = written(
        home / "code" / "bridge", GATE.replace("toll", "bridge").replace("version: 1.0.0", "version: 2.0.0")
    )
    altered = written(home / "code" / "tunnel", GATE.replace("toll", "tunnel").replace("max_minor: 1", "max_minor: 2"))
    with pytest.raises(ContractError, match=r"version `1.0.0` differs from the registered `1.0.0` but is not higher"):
        opened(ServiceSettings(gates=(str(raised), str(altered))), Counted())
    with closing(paths.open_record(home / "bridge")) as record:
        assert ["1.0.0"] == [version for (version,) in record.rows("SELECT version FROM contracts")]
    with closing(paths.open_record(home / "tunnel")) as record:
        assert 1 == record.value("SELECT count(*) FROM ledger WHERE kind = 'REFUSED'")


@pytest.mark.parametrize(
    ("sound", "broken", "said"),
    [
        ("(Toll(), Toll())", "open(folder / 'fines.db')", "`open` of gate `tunnel` failed"),
        ("(Toll(), Toll())", "(Toll(), object())", "the executor must be"),
        (
            "    idempotent = True\n",
            "    idempotent = True\n    def check_contract(self, contract): raise UsageError('nobody waives')\n",
            "nobody waives",
        ),
    ],
)
def test_no_contract_is_put_in_force_before_the_sources_and_executors_of_all_gates_are_open(
    home: Path, sound: str, broken: str, said: str
) -> None:
    bridge = GATE.replace("toll", "bridge")
    tunnel = GATE.replace("toll", "tunnel").replace(sound, broken).replace("sds import", "sds import UsageError,")
    settings = [str(written(home / name, code).parent) for name, code in (("bridge", bridge), ("tunnel", tunnel))]
    with pytest.raises(UsageError, match=said):
        opened(ServiceSettings(gates=tuple(settings)), Counted())
    assert not paths.has_record(home / "bridge") or 0 == contracts_in(home / "bridge")


def test_no_contract_is_put_in_force_before_the_records_of_all_gates_are_open(home: Path) -> None:
    settings = gates_of(home, "bridge", "tunnel")
    (home / "tunnel" / "log.jsonl").mkdir()
    with pytest.raises(Exception, match=r"log\.jsonl"):
        opened(settings, Counted())
    assert not paths.has_record(home / "bridge") or 0 == contracts_in(home / "bridge")


def contracts_in(folder: Path) -> int:
    with closing(paths.open_record(folder)) as record:
        return int(record.value("SELECT count(*) FROM contracts"))


def test_sources_and_executors_are_closed_with_their_gates_and_where_another_does_not_open(home: Path) -> None:
    closes = f"""    idempotent = True
    def close(self):
        with open({str(home / "closed")!r}, "a") as file: file.write("x")
"""
    bridge = GATE.replace("toll", "bridge").replace("    idempotent = True\n", closes)
    tunnel = GATE.replace("toll", "tunnel").replace("lambda folder: (Toll(), Toll())", "lambda folder: 1 / 0")
    good, bad = (str(written(home / name, code).parent) for name, code in (("bridge", bridge), ("tunnel", tunnel)))
    opened(ServiceSettings(gates=(good,)), Counted()).close()
    assert "xx" == (home / "closed").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="division by zero"):
        opened(ServiceSettings(gates=(good, bad)), Counted())
    assert "xxxx" == (home / "closed").read_text(encoding="utf-8")


def test_a_model_that_does_not_open_leaves_nothing_open(home: Path) -> None:
    def fails() -> Counted:
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        open_gates(gates_of(home, "bridge"), open_model=fails, now_ms=now_ms)

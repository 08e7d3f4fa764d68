"""Gates are found by name among what is installed, and by path; every mistake is one line with its mend."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sds.definitions import registry
from sds.definitions.definition import GateDefinition
from sds.gate import Gate
from sds.kernel.errors import ContractError, UsageError
from tests.gates.own import GATE, written


def test_a_gate_that_is_installed_is_found_by_its_name() -> None:
    found = registry.find("refund")
    assert ("refund", "refund", "") == (found.name, found.argument, found.option)
    assert "refund" == found.load_contract().gate


@pytest.mark.parametrize("as_file", [True, False])
def test_a_gate_is_found_by_the_path_of_its_folder_or_its_file(tmp_path: Path, as_file: bool) -> None:
    path = written(tmp_path) if as_file else written(tmp_path).parent
    found = registry.find(str(path))
    assert ("toll", f" --gate {path}") == (found.name, found.option)
    assert "toll" == found.load_contract().gate


def test_a_gate_of_a_path_imports_its_neighbours_and_leaves_no_module_and_no_path_behind(tmp_path: Path) -> None:
    written(tmp_path, "from .prices import PRICE\n" + GATE)
    (tmp_path / "prices.py").write_text("PRICE = 3")
    before, paths = set(sys.modules), list(sys.path)
    registry.find(tmp_path)
    assert paths == sys.path
    assert {"gate", "prices"} & set(sys.modules) == {"gate", "prices"} & before
    assert all(name.startswith("_sds_gate_") for name in set(sys.modules) - before if "prices" in name)


def test_what_names_no_gate_is_said_in_words() -> None:
    with pytest.raises(UsageError, match=r"^a gate is a definition, a name or a path$") as caught:
        Gate.load(3)  # type: ignore[arg-type]  # what an untyped program may give
    assert "refund" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "there is no gate at"),
        ("answer = 42", "has no `gate` that is a GateDefinition"),
        ("gate = 42", "has no `gate` that is a GateDefinition"),
        ("import nowhere", r"gate.py:1: ModuleNotFoundError: No module named 'nowhere'"),
        ("gate = ", r"gate.py:1: invalid syntax"),
        ("raise SystemExit(3)", "ends the process when it is imported"),
        (GATE.replace('name="toll"', 'name="Toll"'), "`Toll` is not the name of a gate"),
        (GATE.replace('name="toll"', 'name="refund"'), "has the name of an installed gate, `refund`"),
        (GATE.replace("open=lambda folder: (Toll(), Toll())", "open=3"), "`open` of gate `toll` is not a function"),
    ],
)
def test_what_is_no_gate_is_answered_in_one_line(tmp_path: Path, code: str | None, message: str) -> None:
    if code is not None:
        written(tmp_path, code)
    with pytest.raises(UsageError, match=message) as caught:
        registry.find(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_what_failed_to_be_imported_is_imported_anew_once_it_is_mended(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be imported"):
        registry.find(written(tmp_path, "import nowhere"))
    assert "toll" == registry.find(written(tmp_path)).name


def test_a_gate_with_a_contract_that_is_none_or_another_gates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="mission"):
        registry.find(written(tmp_path / "a", GATE.replace("mission: ", "mision: "))).load_contract()
    with pytest.raises(UsageError, match="gate `other` has the contract of gate `toll`"):
        registry.find(written(tmp_path / "b", GATE.replace('name="toll"', 'name="other"'))).load_contract()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("Toll()", r"`open` of gate `toll` does not return \(source, executor\)"),
        ("(Toll(), 3)", "the executor must be an object with `idempotent`"),
        ("(3, Toll())", r"the state source must be an object with a method `read\(key\)`"),
        ("1 / 0", r"`open` of gate `toll` failed: .*gate.py:[0-9]+: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_opened_is_refused_and_what_was_opened_is_closed(
    tmp_path: Path, parts: str, message: str
) -> None:
    code = GATE.replace("lambda folder: (Toll(), Toll())", f"lambda folder: {parts}")
    gate = registry.find(written(tmp_path, code))
    with pytest.raises(UsageError, match=message), gate.opened(tmp_path / "home"):
        raise AssertionError("it opened")


@pytest.mark.parametrize("events", ["[({},)]", "[None]", "['{}']", "[QueuedCase(5)]"])
def test_a_queue_of_what_is_no_event_is_refused_with_what_it_held(tmp_path: Path, events: str) -> None:
    code = GATE.replace("open=lambda folder", f"events=lambda folder: {events}, open=lambda folder").replace(
        ", events=events", ""
    )
    gate = registry.find(written(tmp_path, "from sds import QueuedCase\n" + code))
    with pytest.raises(UsageError, match="`events` of gate `toll` yields what is no event: ") as refused:
        gate.cases(tmp_path / "home")
    assert "yield mappings" in refused.value.hint


def test_a_source_and_an_executor_are_closed_in_the_end(tmp_path: Path) -> None:
    closed: list[str] = []

    class Part:
        idempotent = True

        def read(self, key: str) -> None: ...

        def dispatch(self) -> None: ...

        def lookup(self) -> None: ...

        def close(self) -> None:
            closed.append("one")

    gate = GateDefinition(name="toll", contract=Path("none"), open=lambda folder: (Part(), Part()))  # type: ignore[arg-type]
    with gate.opened(tmp_path):
        assert [] == closed
    assert ["one", "one"] == closed


def test_two_packages_that_bring_a_gate_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [EntryPoint("toll", value, registry.GROUP) for value in ("one:gate", "other:gate")]
    monkeypatch.setattr(registry, "entry_points", lambda group: both)
    with pytest.raises(UsageError, match="two packages provide a gate `toll`"):
        registry.find("toll")


@pytest.mark.parametrize(
    ("value", "message"),
    [("nowhere:gate", "the gate `toll` cannot be loaded: .*No module"), ("sds.gates.refund.gate:gate", "not `toll`")],
)
def test_an_entry_point_that_brings_no_such_gate_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("toll", value, registry.GROUP)])
    with pytest.raises(UsageError, match=message):
        registry.find("toll")


def test_a_plain_name_runs_no_code_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "toll", "raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no gate `toll`") as caught:
        registry.find("toll")
    assert caught.value.hint.endswith("there is one at `./toll`")


def test_an_installation_without_entry_points_is_told_from_a_gate_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    with pytest.raises(UsageError, match="there is no gate `refund`") as caught:
        registry.find("refund")
    assert "install this package again" in caught.value.hint

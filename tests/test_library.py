"""The reference of the library names everything that a program can give, call and get."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import sds
from sds import Answer, Gate, GateDefinition
from sds.cli.setup.new import new
from sds.kernel import errors
from sds.kernel.executor import protocol as executors
from sds.kernel.executor.protocol import Settlement
from sds.submission import Handle

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
GATE = "`Gate(contract, source, executor"


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[0]


def cells(title: str) -> set[str]:
    """Return the names that stand alone in the first column of a section's tables."""
    rows = re.findall(r"^\| ([^|]*)\|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


PROPERTIES = {name for name in public(Gate) if isinstance(vars(Gate)[name], property)}


def test_every_parameter_of_a_gate_is_named_and_no_other() -> None:
    assert set(inspect.signature(Gate).parameters) | PROPERTIES == cells(GATE)
    for name in set(inspect.signature(Gate.load).parameters) - {"name"}:
        assert f"{name}=" in section(GATE)


def test_every_method_of_a_gate_is_named_with_its_parameters() -> None:
    for name in public(Gate) - {"load"} - PROPERTIES:
        (row,) = re.findall(rf"^\| `{name}\(([^`]*)\)`", section(GATE), re.MULTILINE)
        assert [*inspect.signature(vars(Gate)[name]).parameters][1:] == re.findall(r"\w+", row), name


def test_every_field_of_an_answer_and_of_a_definition_is_named_and_no_other() -> None:
    assert {field.name for field in fields(Answer)} | {"pending", "retryable"} == cells("An answer")
    assert {field.name for field in fields(GateDefinition)} == cells("A gate's definition")


def test_every_method_of_a_handle_is_named_with_its_parameters() -> None:
    for name in public(Handle):
        (row,) = re.findall(rf"^\| `{name}\(([^`]*)\)`", section("A handle"), re.MULTILINE)
        assert [*inspect.signature(vars(Handle)[name]).parameters][1:] == re.findall(r"\w+", row), name


def test_every_receipt_and_every_method_of_an_executor_is_named() -> None:
    text = section("An executor")
    assert set(Settlement.__args__) == cells("An executor")
    for kind in (executors.Executor, executors.Voids, executors.Reverts, executors.RevertsOrders, executors.Lists):
        assert [] == [name for name in public(kind) | set(kind.__annotations__) if f"`{name}" not in text]


def test_every_public_name_that_a_gate_is_written_with_is_on_the_page() -> None:
    assert [] == [name for name in sds.__all__ if name not in PAGE]


def test_every_error_is_in_the_table_of_errors() -> None:
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SdsError)}
    assert tree - {"SdsError", "CaseKeyError"} <= cells("Errors")


def test_every_field_that_the_page_names_of_a_result_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]*\| ([^|]*)\|", section("What other methods return"), re.MULTILINE)
    assert {"Event", "DecisionPacket", "SagaAnswer", "Case", "CaseView", "Recovered", "Comparison", "Erased"} == {
        name for name, _ in rows
    }
    for name, said in rows:
        has = {member for member in dir(getattr(sds, name)) if not member.startswith("_")}
        has |= {field.name for field in fields(getattr(sds, name))}
        assert [] == [each for each in re.findall(r"`(\w+)[`.(]", re.sub(r"\([^)]*\)", "", said)) if each not in has], (
            name
        )


def test_the_test_of_a_gate_on_the_page_passes(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", section("Testing a gate"), re.DOTALL)
    assert code is not None
    new("held_payments", tmp_path / "held_payments")
    (tmp_path / "test_page.py").write_text(code[1])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(sds.__file__).parents[1])},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout

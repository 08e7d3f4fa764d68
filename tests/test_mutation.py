"""How the mutants of `tests.mutation` are told apart; the mutants themselves are tried outside CI."""

from __future__ import annotations

import pytest

from tests.mutation import ROOT, Mutant, chosen_tests, meaning, without_statements

SOURCE = '''\
def paid(amount: int, *, left: int) -> bool:
    """Tell whether it fits."""
    if amount > left:
        raise ValueError
    return True
'''


@pytest.mark.parametrize(
    ("old", "new"), [("*, left", "/, left"), ("int, ", "int | None, "), ("Tell whether", "Say that"), ("-> bool", "")]
)
def test_what_changes_no_run_is_no_mutant(old: str, new: str) -> None:
    assert old in SOURCE
    assert meaning(SOURCE) == meaning(SOURCE.replace(old, new))


def test_whether_data_may_change_is_what_mypy_holds() -> None:
    source = "@dataclass(frozen=True, slots=True)\nclass A:\n    pass"
    assert meaning(source) == meaning(source.replace("frozen=True", "frozen=False"))


@pytest.mark.parametrize(("old", "new"), [(">", ">="), ("True", "False"), ("raise ValueError", "pass")])
def test_what_changes_a_run_is_one(old: str, new: str) -> None:
    assert meaning(SOURCE) != meaning(SOURCE.replace(old, new))
    assert None is meaning("def")


def test_a_change_is_named_without_its_line() -> None:
    change = Mutant("kernel/x.py", 3, "", SOURCE, SOURCE.replace("amount > left", "amount >= left")).change
    assert "kernel/x.py: `if amount > left:` -> `if amount >= left:`" == change


def test_each_statement_is_left_out_once() -> None:
    left_out = {Mutant("x.py", line, how, SOURCE, make()).change for line, how, make in without_statements(SOURCE)}
    assert {
        'x.py: `"""Tell whether it fits."""` -> `pass`',
        "x.py: `if amount > left: raise ValueError` -> `pass`",
        "x.py: `raise ValueError` -> `pass`",
        "x.py: `return True` -> `pass`",
    } == left_out


def test_the_tests_of_a_module_come_first() -> None:
    near, quick = (chosen_tests("kernel/decision/jit.py", ROOT, near=near) for near in (True, False))
    assert "tests/kernel/decision/test_jit.py" == near[0]
    assert near == quick[: len(near)]
    assert "tests/kernel/flow/test_crash.py" not in quick

"""What a gate of one's own imports: `from sds import ...`, whatever the rooms inside are called."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import sds
from sds.engines.protocol import Engine
from sds.kernel import errors
from sds.kernel.envelope.state import StateSource
from sds.kernel.executor.protocol import Executor
from sds.submission import Handle

OF_PYTHON = {"Path", "PathLike", "Mapping", "Callable", "Iterator", "Any", "Self", "None", "Future"}
NOT_PROMISED = {
    "Decision",
    "Kernel",
    "Log",
    "Reasoned",
    "CaseKeyError",
}  # a closer look; forms of functions; a kind of StoreError


def test_every_public_name_is_there() -> None:
    assert [] == [name for name in sds.__all__ if getattr(sds, name, None) is None]
    assert "Gate" in sds.__all__


def test_an_unknown_name_is_told_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module `sds` has no attribute `Gates`"):
        sds.Gates  # noqa: B018


def test_a_name_loads_no_more_than_it_needs() -> None:
    code = "import sys; from sds import StateRead; print('sds.gate' in sys.modules, 'llama_cpp' in sys.modules)"
    assert (
        "False False\n"
        == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def test_every_error_of_the_tree_can_be_caught_by_a_public_name() -> None:
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SdsError)}
    assert set() == tree - set(sds.__all__) - NOT_PROMISED


@pytest.mark.parametrize("kind", [sds.Gate, Handle, Engine, StateSource, Executor])
def test_every_type_that_a_program_is_given_has_a_public_name(kind: type) -> None:
    functions = [getattr(kind, name) for name in vars(kind) if not name.startswith("_")]
    functions += [kind.__init__] if kind is sds.Gate else []
    functions = [getattr(each, "fget", None) or each for each in functions]
    said = [part for each in functions if callable(each) for part in inspect.get_annotations(each).values()]
    named = {name for part in said for name in re.findall(r"\b[A-Z][a-z]\w+", str(part))}
    assert named
    assert set() == named - set(sds.__all__) - OF_PYTHON - NOT_PROMISED

"""What a gate of one's own imports: `from sds import ...`, whatever the rooms inside are called."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sds


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

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sds.models.protocol import BackendError, importing

PROGRAM = "import sds.models, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'llama_cpp' in sys.modules)"


@pytest.mark.parametrize(("given", "found"), [(None, "200 False"), ("5000", "5000 False")])
def test_threads_do_not_spin_unless_the_operator_says_so(given: str | None, found: str):
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given:
        environment["GOMP_SPINCOUNT"] = given
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert found == done.stdout.strip()


@pytest.mark.parametrize(
    ("content", "said", "hint"),
    [
        (None, "the option is not installed", "install it"),
        ("import nowhere", "the option is not installed", "install it"),
        ("raise ImportError('libomp.so:\\nno such file')", "an import failed: libomp.so: no such file", ""),
        ("import sds.nowhere", "an import failed: No module named 'sds.nowhere'", ""),
        ("from os import nowhere", "an import failed: cannot import name 'nowhere' from 'os'", ""),
    ],
)
def test_only_a_package_that_is_missing_is_said_to_be_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, said: str, hint: str
):
    monkeypatch.syspath_prepend(tmp_path)
    if content is not None:
        (tmp_path / "anoption.py").write_text(content)
    with pytest.raises(BackendError) as refused, importing("the option is not installed", "install it"):
        importlib.import_module("anoption")
    assert str(refused.value).startswith(said)
    assert hint == refused.value.hint

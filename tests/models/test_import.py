from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import sds.models, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'llama_cpp' in sys.modules)"


@pytest.mark.parametrize(("given", "found"), [(None, "200 False"), ("5000", "5000 False")])
def test_threads_do_not_spin_unless_the_operator_says_so(given: str | None, found: str):
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given:
        environment["GOMP_SPINCOUNT"] = given
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert found == done.stdout.strip()

"""A gate loads no option that it does not use: no saga, no human review, no recovery, no linter, no command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gates.own import written

CODE = """
import sys
from pathlib import Path
from tests.proposers import Greedy
before = set(sys.modules)
from sds import Gate
with Gate.load(Path(sys.argv[1]), folder=Path(sys.argv[2]), engine=Greedy("WAIVE")) as gate:
    assert "SUCCESS" == gate.decide({"trip_id": "T-1", "car_id": "CAR-1", "text": "Please."}).execution
print(*sorted(set(sys.modules) - before))
"""
OPTIONS = (
    "sds.kernel.saga", "sds.kernel.human", "sds.kernel.audit", "sds.sagas", "sds.escalations", "sds.reconciliation",
    "sds.lint", "sds.cli", "sds.gates.refund", "sds.kernel.operations.recovery",
)  # fmt: skip


def test_a_decision_of_a_gate_without_options_loads_none_of_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(written(tmp_path / "toll")), str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert [] == [name for name in done.stdout.split() if name.startswith(OPTIONS)]

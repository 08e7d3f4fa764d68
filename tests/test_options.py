"""A gate loads no option that it does not use: no saga, no human review, no recovery, no linter, no command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gates.own import GATE, written

CODE = """
import sys
from pathlib import Path
from sds import Gate
from sds.kernel.decision.packet import Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal

class Waives:
    model = "waives"
    def propose(self, packet, *, tokens_max):
        kind = packet.envelope.kind("WAIVE")
        return write_proposal(Proposal("WAIVE", (("amount", "1.00"),), kind.reasons[0], packet.snapshot.id)), Decoding("waives", 0.9)
    def count_tokens(self, text):
        return len(text)
    def close(self):
        pass

with Gate.load(Path(sys.argv[1]), folder=Path(sys.argv[2]), engine=Waives()) as gate:
    print(gate.decide({"trip_id": "T-1", "car_id": "CAR-1", "text": "Please."}).execution, *sys.modules)
    gate.recover()
print(*sys.modules)
"""
OPTIONS = (
    "sds.kernel.saga", "sds.kernel.human", "sds.kernel.audit", "sds.sagas", "sds.escalations", "sds.reconciliation",
    "sds.rationale", "sds.policy", "sds.judgement", "sds.models.readers", "sds.models.fitting", "sds.lint", "sds.cli", "sds.gates.refund", "sds.kernel.operations",
    "sds.kernel.context", "sds.engines.fallback", "sds.engines.text", "sds.engines.config", "sds.models.text", "sds.grammars.emit", "sds.models.openvino_.backend",
    "sds.models.transformers_.backend", "sds.executors", "sds.replay", "sds.service", "sds.client", "sds.benchmarks",
)  # fmt: skip


def test_a_decision_of_a_gate_without_options_loads_none_of_them(tmp_path: Path) -> None:
    """Nor does a recovery load what no flow of the record needs. The engine is written here: the tests' own load options."""
    forgets = GATE.replace("spend:", "memory: {entries_max: 0}\nspend:")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(written(tmp_path / "toll", forgets)), str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    (execution, *deciding), recovering = (line.split() for line in done.stdout.splitlines())
    assert "SUCCESS" == execution
    assert [] == [name for name in deciding if name.startswith(OPTIONS)]
    assert [] == [name for name in recovering if name.startswith(("sds.kernel.saga", "sds.kernel.human"))]

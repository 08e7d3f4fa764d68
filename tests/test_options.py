"""What the core does without: an option is loaded when it is first used, and never by a gate that does not use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = (
    "sds.kernel.saga",
    "sds.kernel.human",
    "sds.kernel.audit",
    "sds.sagas",
    "sds.escalations",
    "sds.reconciliation",
    "sds.rationale.worker",
    "sds.kernel.context.rationale",
    "sds.kernel.operations.adoption",
    "sds.kernel.operations.erasure",
    "sds.lint",
    "sds.benchmarks",
)
ONE_DECISION = """
import sys
from pathlib import Path
from sds.gate import Gate
from sds.gates.refund.gate import ensure_world, gate as definition, read_queue
from sds.kernel.decision.packet import Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal

class Denies:
    model = "denies"
    def propose(self, packet, *, tokens_max):
        denial = packet.envelope.kind("DENY")
        return write_proposal(Proposal("DENY", (), denial.reasons[0], packet.snapshot.id)), Decoding("denies", 0.9)
    def count_tokens(self, text):
        return len(text)
    def close(self):
        pass

folder = Path(sys.argv[1])
ensure_world(folder, claims=1)
with Gate.load(definition, folder=folder, engine=Denies()) as gate:
    answer = gate.decide(read_queue(folder)[0].event)
    recovered = gate.recover()
print(answer.state, recovered.sagas_ended, *sys.modules)
"""


def test_a_gate_that_decides_loads_no_option(tmp_path: Path) -> None:
    """Not one module of sagas, of human review and so on: neither to decide nor to recover what is no saga."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_DECISION, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    state, ended, *loaded = done.stdout.split()
    assert state in {"CLOSED", "ESCALATED"}
    assert "0" == ended
    assert set() == {name for name in loaded for option in OPTIONS if name == option or name.startswith(f"{option}.")}

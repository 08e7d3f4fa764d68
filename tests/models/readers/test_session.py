"""What a model's session leaves beside its answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

OPENED = """
import sys
from pathlib import Path
from sds.models.readers.session import Session
Session(Path(sys.argv[1]).read_bytes()).close()
"""


def test_a_session_writes_no_id_of_the_machine_and_keeps_nothing_to_send(tmp_path: Path) -> None:
    model = ROOT / "sds" / "gates" / "refund" / "readers" / "cause" / "model.onnx"
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", OPENED, str(model)],
        cwd=ROOT, env={"PATH": os.environ["PATH"], **home}, check=True, timeout=60,
    )  # fmt: skip
    assert [] == list(tmp_path.iterdir())

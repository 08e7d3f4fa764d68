"""How much of the house one decision walks through: the files that a warm refund enters, counted as it is made."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import sds
from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.gates.refund.gate import ensure_world, read_queue
from sds.host.clock import now_ms
from sds.models.llamacpp.backend import LlamaBackend

HOUSE = Path(sds.__file__).resolve().parents[1]
FILES_MAX = 50  # only ever lowered
FIVE_OF_THE_README = re.compile(r"^\[([a-z_./]+\.py)\]\(\1\) \(", re.MULTILINE)


class Trace:
    """The files of this project whose code runs while it is on, in every thread that begins after it was made."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call":
            path = Path(frame.f_code.co_filename).resolve()  # through the links in `sds/`
            if path.is_file() and path.is_relative_to(HOUSE):
                file = path.relative_to(HOUSE)
                if file.parts[0] not in ("tests", ".venv"):
                    self.files.setdefault(str(file))


@pytest.fixture
def trace() -> Iterator[Trace]:
    made = Trace()
    threading.setprofile(made)
    sys.setprofile(made)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation says


def test_one_warm_decision_enters_few_files(trace: Trace, tmp_path: Path, tiny_path: Callable[[int], Path]) -> None:
    ensure_world(tmp_path, claims=3)
    engine = NativeEngine(LlamaBackend(tiny_path(1), threads=1), now_ms=now_ms)
    with Gate.load("refund", folder=tmp_path, engine=engine) as gate:
        first, second, *_ = read_queue(tmp_path)
        gate.decide(first.event)
        trace.on = True
        answer = gate.decide(second.event)
        trace.on = False
    print(f"{len(trace.files)} files:", *trace.files, sep="\n  ")
    assert answer.state in {"CLOSED", "ESCALATED", "ABORTED"}
    assert len(trace.files) <= FILES_MAX
    five = FIVE_OF_THE_README.findall((HOUSE / "README.md").read_text(encoding="utf-8"))
    assert five == [file for file in trace.files if file in five]
    assert 5 == sum((HOUSE / file).read_text(encoding="utf-8").count("\n") <= 300 for file in five)

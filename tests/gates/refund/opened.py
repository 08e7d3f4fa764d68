"""The refund gate, opened with a proposer of the test's own and with its rail at hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sds.definitions.registry import find
from sds.gate import Gate
from sds.gates.refund.rail.client import RailProcess
from sds.pipeline import Reasoned


def open_refund(
    folder: Path,
    *,
    engine: Any,
    on_reasoned: Reasoned | None = None,
    with_rail: Callable[[RailProcess], object] = lambda _: None,
) -> Gate:
    """Open the refund gate in `folder` as `Gate.load` does; `with_rail` is called with the payment rail's process."""
    gate = find("refund")
    with ExitStack() as opened:
        source, executor = opened.enter_context(gate.opened(folder))
        with_rail(executor.process)  # type: ignore[attr-defined]
        refund = Gate(gate.load_contract(), source, executor, folder=folder, engine=engine, on_reasoned=on_reasoned)
        refund.on_close(opened.pop_all().close)
    return refund

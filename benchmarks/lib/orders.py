"""Gates whose orders are not sent: a benchmark decides events, and must not pay for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sds.definitions.definition import GateDefinition
from sds.definitions.registry import find
from sds.kernel.envelope.state import StateSource
from sds.kernel.executor.protocol import ExecutionIntent, Executor, Receipt

# A gate, as `sds serve` loads it in a process of its own
_FILE = "from sds.benchmarks.lib.orders import without_orders\n\ngate = without_orders({gate!r})\n"


class StandIn:
    """Settles every order at once and sends none. `instead_of`: the executor that it closes in the end, where it was opened."""

    idempotent = True

    def __init__(self, instead_of: Executor | None = None) -> None:
        self._instead_of, self._keys = instead_of, set[str]()

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        self._keys.add(key)
        return Receipt("settled", reference=key[:12])

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("settled", reference=key[:12]) if key in self._keys else Receipt("absent")

    def close(self) -> None:
        if callable(close := getattr(self._instead_of, "close", None)):
            close()


def without_orders(gate: str | GateDefinition) -> GateDefinition:
    """Return a gate with a stand-in for its executor. The package's own gates, whose executors are simulated in their
    folder, are returned as they are.
    """
    definition = find(gate) if isinstance(gate, str) else gate
    if definition.path is None and definition.open.__module__.startswith("sds.gates."):
        return definition

    def opened(folder: Path) -> tuple[StateSource, Executor]:
        if definition.source is not None:
            return definition.source(folder), StandIn()
        source, executor = definition.open(folder)
        return source, StandIn(executor)

    return replace(definition, open=opened)


def argument_of(gate: GateDefinition, folder: Path) -> str:
    """Return what `sds serve` serves a gate without orders by: its name, or a file that is written in a new folder."""
    if without_orders(gate) is gate:
        return gate.argument
    folder.mkdir(parents=True)
    file = folder / "gate.py"
    named = str(gate.path.resolve()) if gate.path is not None else gate.name
    file.write_text(_FILE.format(gate=named), encoding="utf-8")
    return str(file)

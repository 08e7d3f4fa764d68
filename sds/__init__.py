"""The Sovereign Decision Stream: a local model decides, and cannot step outside its authority.

    from sds import Gate

    with Gate.load("refund") as gate:
        answer = gate.decide({"claim_id": "...", "ticket_id": "...", "claim_text": "..."})

`__all__` names all that a gate of your own needs. The modules that these names come from may change. Importing `sds` loads
nothing else: each name is loaded on its first use, and the libraries of the models with the first `Gate`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sds.definitions.definition import GateDefinition, QueuedCase
    from sds.engines.protocol import Engine
    from sds.executors.http import HttpExecutor, load_executor
    from sds.gate import Gate
    from sds.kernel.contract.schema import Contract, load_contract, parse_contract
    from sds.kernel.envelope.state import StateRead, StateSource
    from sds.kernel.errors import ExecutorError, SdsError, StateError, UsageError, WorldError
    from sds.kernel.executor.protocol import ExecutionIntent, Executor, Receipt
    from sds.kernel.executor.statement import StatementLine
    from sds.kernel.flow.states import Answer

__all__ = [
    "Answer",
    "Contract",
    "Engine",
    "ExecutionIntent",
    "Executor",
    "ExecutorError",
    "Gate",
    "GateDefinition",
    "HttpExecutor",
    "QueuedCase",
    "Receipt",
    "SdsError",
    "StateError",
    "StateRead",
    "StateSource",
    "StatementLine",
    "UsageError",
    "WorldError",
    "load_contract",
    "load_executor",
    "parse_contract",
]
__version__ = "0.1.0"

_HOME = {
    "sds.engines.protocol": ("Engine",),
    "sds.executors.http": ("HttpExecutor", "load_executor"),
    "sds.gate": ("Gate",),
    "sds.definitions.definition": ("GateDefinition", "QueuedCase"),
    "sds.kernel.contract.schema": ("Contract", "load_contract", "parse_contract"),
    "sds.kernel.envelope.state": ("StateRead", "StateSource"),
    "sds.kernel.errors": ("ExecutorError", "SdsError", "StateError", "UsageError", "WorldError"),
    "sds.kernel.executor.protocol": ("ExecutionIntent", "Executor", "Receipt"),
    "sds.kernel.executor.statement": ("StatementLine",),
    "sds.kernel.flow.states": ("Answer",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            found: object = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module `sds` has no attribute `{name}`")

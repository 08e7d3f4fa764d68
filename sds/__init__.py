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
    from sds.definitions.definition import GateDefinition, LabelledCase, QueuedCase
    from sds.engines.protocol import Engine
    from sds.executors.http import HttpExecutor, load_executor
    from sds.gate import Gate
    from sds.kernel.contract.schema import Contract, load_contract, parse_contract
    from sds.kernel.decision.packet import DecisionPacket, Decoding
    from sds.kernel.envelope.state import StateRead, StateSource
    from sds.kernel.errors import (
        ContractError,
        ErasedError,
        EventError,
        ExecutorError,
        LanguageError,
        ModelError,
        SdsError,
        StateError,
        StoreError,
        TransitionError,
        UsageError,
        WorldError,
    )
    from sds.kernel.executor.protocol import ExecutionIntent, Executor, Receipt
    from sds.kernel.executor.statement import Comparison, StatementLine
    from sds.kernel.flow.intake import Event
    from sds.kernel.flow.states import Answer
    from sds.kernel.human.cases import Case
    from sds.kernel.human.review import CaseView
    from sds.kernel.operations.erasure import Erased
    from sds.kernel.operations.recovery import Recovered
    from sds.kernel.saga.state import SagaAnswer
    from sds.scripted import ScriptedEngine, proposal
    from sds.submission import Handle

__all__ = [
    "Answer",
    "Case",
    "CaseView",
    "Comparison",
    "Contract",
    "ContractError",
    "DecisionPacket",
    "Decoding",
    "Engine",
    "Erased",
    "ErasedError",
    "Event",
    "EventError",
    "ExecutionIntent",
    "Executor",
    "ExecutorError",
    "Gate",
    "GateDefinition",
    "Handle",
    "HttpExecutor",
    "LabelledCase",
    "LanguageError",
    "ModelError",
    "QueuedCase",
    "Receipt",
    "Recovered",
    "SagaAnswer",
    "ScriptedEngine",
    "SdsError",
    "StateError",
    "StateRead",
    "StateSource",
    "StatementLine",
    "StoreError",
    "TransitionError",
    "UsageError",
    "WorldError",
    "load_contract",
    "load_executor",
    "parse_contract",
    "proposal",
]
__version__ = "0.1.0"

_HOME = {
    "sds.definitions.definition": ("GateDefinition", "LabelledCase", "QueuedCase"),
    "sds.engines.protocol": ("Engine",),
    "sds.scripted": ("ScriptedEngine", "proposal"),
    "sds.executors.http": ("HttpExecutor", "load_executor"),
    "sds.gate": ("Gate",),
    "sds.kernel.contract.schema": ("Contract", "load_contract", "parse_contract"),
    "sds.kernel.decision.packet": ("DecisionPacket", "Decoding"),
    "sds.kernel.envelope.state": ("StateRead", "StateSource"),
    "sds.kernel.errors": (
        "ContractError",
        "ErasedError",
        "EventError",
        "ExecutorError",
        "LanguageError",
        "ModelError",
        "SdsError",
        "StateError",
        "StoreError",
        "TransitionError",
        "UsageError",
        "WorldError",
    ),
    "sds.kernel.executor.protocol": ("ExecutionIntent", "Executor", "Receipt"),
    "sds.kernel.executor.statement": ("Comparison", "StatementLine"),
    "sds.kernel.flow.intake": ("Event",),
    "sds.kernel.flow.states": ("Answer",),
    "sds.kernel.human.cases": ("Case",),
    "sds.kernel.human.review": ("CaseView",),
    "sds.kernel.operations.erasure": ("Erased",),
    "sds.kernel.operations.recovery": ("Recovered",),
    "sds.kernel.saga.state": ("SagaAnswer",),
    "sds.submission": ("Handle",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            found: object = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module `sds` has no attribute `{name}`")

"""Open the gates that one process serves. Gates that need a language model share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache

from sds.definitions.definition import GateDefinition
from sds.definitions.registry import find
from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.host import paths
from sds.host.keys import refuse_other_keys
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.registry import registry
from sds.opening import decisions_at_once
from sds.policy.opening import open_policy
from sds.service.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class OpenGate:
    """A gate that is served, and the definition that it was opened from."""

    definition: GateDefinition
    gate: Gate

    @property
    def name(self) -> str:
        return self.gate.contract.gate

    @property
    def deadline_ms_max(self) -> int:
        """The longest deadline that a request may name: the contract's time for one decision."""
        return self.gate.contract.budget.ttl_ms

    @property
    def answer_ms_max(self) -> int:
        """How long a decision and the dispatch of its order may take together."""
        budget = self.gate.contract.budget
        return budget.ttl_ms + budget.dispatch_ms_max


class OpenGates(Mapping[str, OpenGate]):
    """The open gates by name, in the order of the settings. `close_engines` closes the gates' engines."""

    def __init__(self, gates: Mapping[str, OpenGate], close_engines: Callable[[], None] = lambda: None) -> None:
        self._gates, self._close_engines = dict(gates), close_engines

    def __getitem__(self, name: str) -> OpenGate:
        return self._gates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    @property
    def parallel(self) -> int:
        """How many decisions run at once: the largest number of any gate, since all gates share the machine."""
        return max((decisions_at_once(each.gate.engine) for each in self._gates.values()), default=1)

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new events, wait up to `drain_s` seconds for decisions under way, close all gates, then their engines."""
        try:
            with ThreadPoolExecutor(max(1, len(self._gates))) as pool:
                list(pool.map(lambda each: each.gate.close(drain_s), self._gates.values()))
        except RuntimeError:  # the system gives no thread
            for each in self._gates.values():
                each.gate.close(drain_s)
        finally:
            self._close_engines()


def open_gates(settings: ServiceSettings, *, open_model: Callable[[], Engine], now_ms: Callable[[], int]) -> OpenGates:
    """Open every gate of the settings. `open_model` is called at most once, when the first gate needs a language model.

    Raises UsageError, ModelError, StoreError; then nothing stays open.
    """
    definitions = [find(name) for name in settings.gates]
    names = [definition.name for definition in definitions]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the gate `{twice[0]}` is named twice", hint="give --gate once for each gate")
    with ExitStack() as opened:
        engines = ExitStack()
        opened.callback(engines.close)

        @cache
        def shared_model() -> Engine:
            model = open_model()
            engines.callback(model.close)
            return model

        # A contract that is put in force ends the decisions of every process with an older one. So all that may fail comes first:
        # engines, sources, executors, then records, which opening may raise to a newer schema, and contracts that are refused.
        engine_of = {each.name: _engine_of(each, settings, shared_model, engines, now_ms) for each in definitions}
        gates = _opened(definitions, engine_of, opened, now_ms)
        for each in gates.values():
            each.gate.register()
        opened.pop_all()
    return OpenGates({name: gates[name] for name in names}, engines.close)


def _opened(
    definitions: list[GateDefinition], engine_of: Mapping[str, Engine], opened: ExitStack, now_ms: Callable[[], int]
) -> dict[str, OpenGate]:
    """Return open gates, without putting their contracts in force. Raises ContractError where a record refuses one."""
    closing_of = {each.name: opened.enter_context(ExitStack()) for each in definitions}
    parts = [closing_of[each.name].enter_context(each.opened(paths.gate_home(each.name))) for each in definitions]
    parts_of = dict(zip(closing_of, parts, strict=True))
    gates = dict[str, OpenGate]()
    for definition in sorted(definitions, key=lambda each: not _would_be_refused(each, now_ms)):
        name, contract = definition.name, definition.load_contract()
        folder, engine = paths.gate_home(name), engine_of[name]
        gate = Gate(contract, *parts_of[name], folder=folder, engine=engine, now_ms=now_ms, register=False)
        gate.on_close(closing_of[name].close)
        opened.callback(gate.close)
        if registry.refusal(gate.store, contract, now_ms=now_ms()) is not None:
            gate.register()  # raises, and writes the refusal
        gates[name] = OpenGate(definition, gate)
    return gates


def _would_be_refused(definition: GateDefinition, now_ms: Callable[[], int]) -> bool:
    """Tell whether a gate's record has other keys than are here, or would not take the gate's contract. Writes nothing."""
    folder = paths.gate_home(definition.name)
    try:
        record = paths.look_at_record(folder)
        if record is None:
            return False
        with closing(record):
            refuse_other_keys(folder, record)
            return registry.refusal(record, definition.load_contract(), now_ms=now_ms()) is not None
    except SdsError:
        return True


def _engine_of(
    definition: GateDefinition,
    settings: ServiceSettings,
    open_model: Callable[[], Engine],
    engines: ExitStack,
    now_ms: Callable[[], int],
) -> Engine:
    """Return a gate's engine: its contract's policy where it has one and the settings name no engines, else the model."""
    contract = definition.load_contract()
    if not contract.policy or settings.engines is not None:
        return open_model()
    readers = paths.fitted_readers(definition.name, definition.readers)
    policy = open_policy(contract, readers, open_model=open_model, now_ms=now_ms, gate=definition.argument)
    engines.callback(policy.close)
    return policy

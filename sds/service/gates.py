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

        gates = dict[str, OpenGate]()
        # A gate that opens puts its contract in force, and no process with an older one decides from then on. So all engines
        # are opened before it, and a gate that would be refused comes first.
        opens = {each.name: _engine_of(each, settings, shared_model, engines, now_ms) for each in definitions}
        for definition in sorted(definitions, key=lambda each: not _would_be_refused(each, now_ms)):
            gate = Gate.load(definition, engine=opens[definition.name], now_ms=now_ms)
            opened.callback(gate.close)
            gates[definition.name] = OpenGate(definition, gate)
        opened.pop_all()
    return OpenGates({name: gates[name] for name in names}, engines.close)


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

"""Kernels of a gate without a model: for looking at what may be decided, and for resolving orders."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from sds.definitions.definition import GateDefinition
from sds.host import paths
from sds.host.clock import now_ms
from sds.host.keys import KEY_BYTES, read_ring, refuse_other_keys
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import NOT_AS_WRITTEN, UsageError
from sds.kernel.executor.protocol import NoExecutor
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry
from sds.kernel.storage.keyring import Signer
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store
from sds.opening import check_fits, context_of

EVENTS_MAX = 2_000
_LATEST_EVENTS = "SELECT trigger_event FROM decision_flows WHERE gate = ? ORDER BY created_at_ms DESC LIMIT ?"


@contextmanager
def preview_kernel(gate: GateDefinition, folder: Path) -> Iterator[Kernel]:
    """Open a kernel that only looks: it has no model, no executor, and a key that signs nothing. It records nothing."""
    contract = gate.load_contract()
    with ExitStack() as opened:
        source = opened.enter_context(gate.opened_source(folder))
        store = _store_to_look_at(folder, contract, opened)
        signer = Signer(secrets.token_bytes(KEY_BYTES))
        context = context_of(contract, store)
        yield Kernel(contract, store, source, NoExecutor(), signer, now_ms=now_ms, context=context, looks=True)


def _store_to_look_at(folder: Path, contract: Contract, opened: ExitStack) -> Store:
    """Return the record if there is one that knows the agent; else an empty temporary one."""
    if paths.has_record(folder):
        store = paths.open_record(folder)
        opened.callback(store.close)
        if store.locked and paths.is_there(paths.key_path(folder)):
            read_ring(paths.key_path(folder))  # raises where the keys, which texts need, are damaged
        if registry.lookup(store, contract.agent_id) is not None:
            return store
    empty = SqliteStore(paths.decisions_path(Path(opened.enter_context(TemporaryDirectory()))))
    opened.callback(empty.close)
    registry.register(empty, contract, by="registry", now_ms=now_ms())
    return empty


@contextmanager
def recovery_kernel(gate: GateDefinition, folder: Path, *, sends: bool = True) -> Iterator[Kernel]:
    """Open a kernel with state source and executor but without a model, for resolving orders.

    It writes to the gate's log. Raises StoreError where the ledger was altered, unless nothing is to be sent: a human may always
    end a case.
    """
    from sds.host.log import JsonLog  # noqa: PLC0415  the command line starts without structlog

    contract = gate.load_contract()
    with ExitStack() as opened:
        store = paths.open_record(folder)
        opened.callback(store.close)
        refuse_other_keys(folder, store)
        signer = paths.signer(folder)
        if sends:
            paths.refuse_altered(folder, store)
        source, executor = opened.enter_context(gate.opened(folder))
        check_fits(executor, contract)
        log = JsonLog(paths.log_path(folder))
        opened.callback(log.close)
        context = context_of(contract, store)
        yield Kernel(contract, store, source, executor, signer, now_ms=now_ms, log=log.write, context=context)


def sample_reads(gate: GateDefinition, folder: Path, limit: int) -> list[Fields]:
    """Return the state of the first `limit` keys in the queue, as the gate reads it; without a queue, of the latest keys in
    its record. Raises UsageError where it has neither.
    """
    key = gate.load_contract().event.key
    events = _recorded_events(gate, folder) if gate.events is None else (case.event for case in gate.cases(folder))
    keys = dict.fromkeys(str(event[key]) for event in events if key in event)
    if gate.events is None and not keys:
        message = f"the state of gate `{gate.name}` is read for the keys of its queue or its record, and it has neither"
        raise UsageError(
            message, hint="decide an event, add `events(folder)` to its definition, or leave this gate out"
        )
    with gate.opened_source(folder) as source:
        reads = (source.read(each) for each in islice(keys, limit))
        return [read.fields for read in reads if read is not None]


def _recorded_events(gate: GateDefinition, folder: Path) -> Iterator[Mapping[str, object]]:
    """Yield the latest events in the gate's record, without the texts that are sealed. What is no event is left out."""
    record = paths.look_at_record(folder)
    if record is None:
        return
    with closing(record):
        for (trigger,) in record.rows(_LATEST_EVENTS, (gate.name, EVENTS_MAX)):
            with suppress(*NOT_AS_WRITTEN):
                event = json.loads(trigger)
                if isinstance(event, dict):
                    yield event

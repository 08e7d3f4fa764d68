"""Helpers of `Gate`: checks of its arguments, and the engine that decides for it, opened and checked before the first event."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike
from pathlib import Path

from sds.definitions.definition import check_parts
from sds.engines.protocol import Checks, Engine, Explains, HasLanguageModel, Logs
from sds.host import paths
from sds.host.keys import refuse_other_keys
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.context import ContextReader, NoContext
from sds.kernel.errors import UsageError
from sds.kernel.flow.dispatch import Log
from sds.kernel.storage.keyring import Signer
from sds.kernel.storage.store import Reader, Store

THREADS_BESIDE = 2  # more than the engine has slots: these read state, wait for the disk, or send orders


def check_given(contract: object, source: object, executor: object, engine: object, on_reasoned: object) -> None:
    """Refuse parts that cannot work, or not together, before anything is opened. Raises UsageError."""
    if not isinstance(contract, Contract):
        raise UsageError(
            "the contract is neither a Contract nor a Path", hint="make one from text with parse_contract(text)"
        )
    check_parts(source, executor)
    check_fits(executor, contract)
    if on_reasoned is not None and not callable(on_reasoned):
        raise UsageError("`on_reasoned` must be a function of a packet and the bytes of its proposal")
    asked = all(callable(getattr(engine, name, None)) for name in ("propose", "count_tokens", "close"))
    if engine is not None and (isinstance(engine, type) or not asked):
        hint = "open one with sds.engines.factory.open_engine, or give `model`, a file or a folder of weights"
        raise UsageError("the engine must be an object with `propose`, `count_tokens` and `close`", hint=hint)


def check_fits(executor: object, contract: Contract) -> None:
    """Raise UsageError where the executor says that it cannot carry out what the contract permits."""
    if callable(check := getattr(executor, "check_contract", None)):
        check(contract)


def forked() -> UsageError:
    """Return the error of a gate in a fork: it has none of the threads, and must not use the locks and connections."""
    hint = "open a gate in the forked process itself"
    return UsageError("the gate was opened by another process", reason_code="FORKED", hint=hint)


def paths_given(folder: object, model: object) -> tuple[Path, Path | None]:
    """Return a gate's folder and its model as paths. Raises UsageError for anything else."""
    return _path(folder, "folder"), None if model is None else _path(model, "model")


def _path(given: object, what: str) -> Path:
    if not isinstance(given, str | PathLike):
        raise UsageError(f"`{what}` must be a path")
    return Path(given)


def listener_given(listener: Log) -> Log:
    """Return the listener. Raises UsageError unless it can be called; later, what the call raises is ignored."""
    if not callable(listener):
        raise UsageError("the listener must be a function of `event` and `facts`")
    return listener


def deadline_given(contract: Contract, deadline_ms: object, decisions: int) -> int:
    """Return a deadline, in ms from now. Raises UsageError unless it is from 1 to the contract's time for so many decisions."""
    most = decisions * contract.budget.ttl_ms
    if type(deadline_ms) is int and 1 <= deadline_ms <= most:
        return deadline_ms
    of = "" if decisions == 1 else f" {decisions} times"
    hint = f"give a whole number from 1 to {most}, the contract's `budget.ttl_ms`{of}"
    raise UsageError(f"`{deadline_ms}` is not a valid deadline", reason_code="DEADLINE_INVALID", hint=hint)


def open_deciding(contract: Contract, model: Path | None, readers: Path | None, *, now_ms: Callable[[], int]) -> Engine:
    """Open the policy of a contract that has one, unless `model` is given; else the language model."""

    def open_model() -> Engine:
        from sds.engines.factory import open_engine  # noqa: PLC0415  libraries of models, loaded with the first one

        return open_engine(model, now_ms=now_ms)

    if not contract.policy or model is not None:  # a model that is named decides itself
        return open_model()
    from sds.policy.opening import open_policy  # noqa: PLC0415  an option, loaded when it is first asked for

    return open_policy(contract, readers, open_model=open_model, now_ms=now_ms)


def check_deciding(engine: Engine, contract: Contract, log: Log) -> None:
    """Log an engine's notices and connect it to the log. Raises ModelError where it cannot decide under the contract."""
    if isinstance(engine, Logs):
        engine.log_to(log)
    for notice in getattr(engine, "notices", ()):
        log("engine.notice", {"notice": notice})
    if isinstance(engine, Checks):
        engine.check_contract(contract)


def open_record(folder: Path, opened: ExitStack) -> tuple[Store, Signer]:
    """Open a gate's record and signer, last of what may be refused: it raises the number of an older record's schema.

    Raises StoreError where the record is not what its keys have signed.
    """
    store = paths.open_record(folder)
    opened.callback(store.close)
    refuse_other_keys(folder, store)
    signer = paths.signer(folder)
    paths.refuse_altered(folder, store)
    return store, signer


def rationale_writer(engine: Engine, contract: Contract) -> Explains | None:
    """Return the writer of the rationales that a contract asks for. Raises UsageError where the engine cannot write."""
    if not contract.explanation_chars_max:
        return None
    from sds.rationale import writer_of  # noqa: PLC0415  an option

    return writer_of(engine.language_model.get() if isinstance(engine, HasLanguageModel) else engine)


def decisions_at_once(engine: Engine) -> int:
    """Return how many threads to run with an engine: its slots and THREADS_BESIDE more."""
    return int(getattr(engine, "slots", 1)) + THREADS_BESIDE


def context_of(contract: Contract, record: Reader, count_tokens: Callable[[str], int] | None = None) -> ContextReader:
    """Return the reader of a contract's memory and artifacts. Without `count_tokens`, texts count by bytes, an upper bound."""
    if not contract.artifacts.names and not contract.memory.entries_max:
        return NoContext(contract)
    from sds.kernel.context.memory import RecordedContext, bytes_of  # noqa: PLC0415  an option

    return RecordedContext(record, contract, count_tokens or bytes_of)

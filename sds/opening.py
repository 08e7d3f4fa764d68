"""What decides for a gate, opened and checked before the first event; and what it was given, refused where it cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from sds.definitions.definition import check_parts
from sds.engines.protocol import Checks, Engine, Logs
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.context import ContextReader, NoContext
from sds.kernel.errors import UsageError
from sds.kernel.flow.dispatch import Log
from sds.kernel.storage.store import Reader

THREADS_BESIDE = 2  # decide besides those that the engine is busy with: they look, wait for the disk, or send


def check_given(contract: object, source: object, executor: object, engine: object) -> None:
    """Refuse what cannot work before anything is opened. Raises UsageError."""
    if not isinstance(contract, Contract):
        raise UsageError("the contract is neither a Contract nor a Path", hint="parse_contract(text) makes one of text")
    check_parts(source, executor)
    asked = all(callable(getattr(engine, name, None)) for name in ("propose", "count_tokens", "close"))
    if engine is not None and (isinstance(engine, type) or not asked):
        hint = "sds.engines.factory.open_engine opens one; `model` names a file or a folder of weights"
        raise UsageError("the engine is no object with `propose`, `count_tokens` and `close`", hint=hint)


def paths_given(folder: object, model: object) -> tuple[Path, Path | None]:
    """Return a gate's folder and its model as paths. Raises UsageError for what is none."""
    return _path(folder, "folder"), None if model is None else _path(model, "model")


def _path(given: object, what: str) -> Path:
    if not isinstance(given, str | PathLike):
        raise UsageError(f"the {what} is no path")
    return Path(given)


def listener_given(listener: Log) -> Log:
    """Return what is to be called with all that is logged. Raises UsageError: later, what its call raises is ignored."""
    if not callable(listener):
        raise UsageError("the listener cannot be called: it is a function of `event` and `facts`")
    return listener


def deadline_given(contract: Contract, deadline_ms: object, decisions: int) -> int:
    """Return a deadline, in milliseconds from now, of so many decisions. Raises UsageError where it is none, or too far ahead."""
    most = decisions * contract.budget.ttl_ms
    if type(deadline_ms) is int and 1 <= deadline_ms <= most:
        return deadline_ms
    of = "" if decisions == 1 else f" {decisions} times"
    hint = f"the contract's `budget.ttl_ms`{of} is {most}: a whole number from 1 to that"
    raise UsageError(f"`{deadline_ms}` is no deadline of this gate", reason_code="DEADLINE_INVALID", hint=hint)


def open_deciding(contract: Contract, model: Path | None, readers: Path | None, *, now_ms: Callable[[], int]) -> Engine:
    """Open what decides: the contract's policy, where it has one, else the language model."""

    def open_model() -> Engine:
        from sds.engines.factory import open_engine  # noqa: PLC0415  libraries of models, loaded with the first one

        return open_engine(model, now_ms=now_ms)

    if not contract.policy or model is not None:  # a model that is named decides itself
        return open_model()
    from sds.policy.opening import open_policy  # noqa: PLC0415  an option, loaded when it is first asked for

    return open_policy(contract, readers, open_model=open_model, now_ms=now_ms)


def check_deciding(engine: Engine, contract: Contract, log: Log) -> None:
    """Have an engine say what is to be known of it. Raises ModelError where it cannot decide under the contract."""
    if isinstance(engine, Logs):
        engine.log_to(log)
    for notice in getattr(engine, "notices", ()):
        log("engine.notice", {"notice": notice})
    if isinstance(engine, Checks):
        engine.check_contract(contract)


def decisions_at_once(engine: Engine) -> int:
    """Return how many threads decide with an engine: as many as it decides at once, and a few; more would only wait."""
    return int(getattr(engine, "slots", 1)) + THREADS_BESIDE


def context_of(contract: Contract, record: Reader, count_tokens: Callable[[str], int] | None = None) -> ContextReader:
    """Return what reads a contract's memory and artifacts. `count_tokens`: as the model does; None: bytes, an upper bound."""
    if not contract.artifacts.names and not contract.memory.entries_max:
        return NoContext(contract)
    from sds.kernel.context.memory import RecordedContext, bytes_of  # noqa: PLC0415  an option

    return RecordedContext(record, contract, count_tokens or bytes_of)

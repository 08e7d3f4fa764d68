"""Recovery after a crash: ends flows that nobody holds any more, and learns what became of every order in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sds.kernel.canonical import in_words, one_line
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow import intake, undecided
from sds.kernel.flow.in_flight import orders_in_flight, times_ms, unfinished_flows
from sds.kernel.flow.kernel import Kernel
from sds.kernel.operations import lookup_pauses
from sds.kernel.storage.store import Reader

ERROR_CHARS_MAX = 200
PAUSED = "PAUSED"  # counts orders that were not asked about; it is no status of an order


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many flows were interrupted, and what the orders in flight turned out to be.

    `unknown`: orders whose end is still unknown; `paused`: those of them that were not asked about, because their pause is
    not over. `leased`: flows left alone because their holder may be alive; recover again when their lease is over.
    `sagas_dirty`: sagas of which something was done, and which need a model: their compensation is to be chosen, or a step is
    due after one that the outside had only accepted. `errors`: one line for
    each flow, order or saga that could not be recovered and stays as it was: its flow, and what was raised.
    """

    interrupted: int = 0
    success: int = 0
    failed: int = 0
    unknown: int = 0
    leased: int = 0
    sagas_ended: int = 0
    sagas_dirty: int = 0
    errors: tuple[str, ...] = ()
    paused: int = 0


def recover(kernel: Kernel, *, now_ms: int, at_once: bool = True) -> Recovered:
    """Recover one gate. Flows whose holder may be alive (lease not over) are left alone. Repeating this is safe.

    One flow, order or saga that cannot be recovered does not stop the others. `at_once`: ask about every order now; else,
    for a caller that recovers every few seconds, about each only when its pause is over (`lookup_pauses`).
    Raises WorldError where the record is stopped (`Wholeness.stopped`).
    """
    kernel.whole.refuse_stopped()
    counts: Counter[str] = Counter()
    interrupted, errors = _interrupt_orphans(kernel, now_ms)

    def is_due(dfid: str) -> bool:
        return at_once or lookup_pauses.is_due(kernel.store, dfid, now_ms)

    for order in orders_in_flight(kernel.store, kernel.contract.gate, now_ms):
        try:
            counts[_resolve(kernel, order) if is_due(order.dfid) else PAUSED] += 1
        except Exception as error:  # noqa: BLE001  a fault of one order must not stop the others
            errors.append(failure(kernel, order.dfid, error))
    leased, ended, dirty = _recover_sagas(kernel, errors, now_ms, is_due) if has_sagas(kernel.store) else (0, 0, 0)
    leased += sum(flow.held for flow in unfinished_flows(kernel.store, kernel.contract.gate, now_ms))
    lookup_pauses.forget_ended(kernel.store)
    unknown, paused = counts["UNKNOWN"] + counts[PAUSED], counts[PAUSED]
    success, failed = counts["SUCCESS"], counts["FAILED"]
    return Recovered(interrupted, success, failed, unknown, leased, ended, dirty, tuple(errors), paused)


def has_sagas(record: Reader) -> bool:
    """Tell whether a record has any saga: only then the code that recovers them is imported."""
    return record.value("SELECT 1 FROM sagas LIMIT 1") is not None


def _recover_sagas(
    kernel: Kernel, errors: list[str], now_ms: int, is_due: Callable[[str], bool]
) -> tuple[int, int, int]:
    """Return how many sagas are still driven, how many have ended, and how many are dirty. Append failures to `errors`."""
    from sds.kernel.saga import driver  # noqa: PLC0415  an option

    ended, dirty, failed = driver.recover(kernel, now_ms=now_ms, is_due=is_due)
    errors += [failure(kernel, dfid, error) for dfid, error in failed]
    return driver.driven(kernel, now_ms=now_ms), ended, dirty


def recover_order(kernel: Kernel, dfid: str, *, now_ms: int) -> bool:
    """Learn what became of a flow's order if its sender is gone. Return whether there was an order to ask about. Raises WorldError
    as `recover` does.
    """
    kernel.whole.refuse_stopped()
    found = [order for order in orders_in_flight(kernel.store, kernel.contract.gate, now_ms) if order.dfid == dfid]
    for order in found:
        _resolve(kernel, order)
    return bool(found)


def _resolve(kernel: Kernel, order: ExecutionIntent) -> str:
    return kernel.dispatcher.resolve(order, partial(_still_valid, kernel))


def _still_valid(kernel: Kernel, order: ExecutionIntent) -> bool:
    """Tell whether an order in flight would be reserved again now, by its decider's terms and within its deadline."""
    if kernel.whole.doubt() is not None:
        return False
    if kernel.store.value("SELECT 1 FROM human_decisions WHERE dfid = ?", (order.dfid,)) is not None:
        from sds.kernel.human.kernel import HumanKernel  # noqa: PLC0415  an option

        return HumanKernel(kernel, now_ms=lambda: kernel.now_ms).still_valid(order)
    _, until_ms = times_ms(kernel.store, order.dfid)
    if until_ms is not None and kernel.now_ms > until_ms:
        return False
    child = intake.saga_child(
        kernel.store.value("SELECT trigger_event FROM decision_flows WHERE dfid = ?", (order.dfid,))
    )
    if child is None:
        return kernel.still_valid(order)
    from sds.kernel.saga.kernels import kernel_of_child  # noqa: PLC0415  an option

    return kernel_of_child(kernel, *child).still_valid(order)


def failure(kernel: Kernel, dfid: str, error: Exception) -> str:
    """Log that a flow, order or saga could not be recovered; return the line that says so."""
    kernel.log("recovery.failed", {"dfid": dfid, "error": type(error).__name__})
    return one_line(f"{dfid}: {type(error).__name__}: {in_words(error)}", ERROR_CHARS_MAX)


def _interrupt_orphans(kernel: Kernel, now_ms: int) -> tuple[int, list[str]]:
    """End every flow whose holder is gone. Return how many were ended, and the errors of those that could not be."""
    interrupted, errors = 0, list[str]()
    for flow in unfinished_flows(kernel.store, kernel.contract.gate, now_ms):
        if flow.state == "ACTIVE" and not flow.held:
            try:
                interrupted += _interrupt(kernel, flow.dfid, now_ms)
            except Exception as error:  # noqa: BLE001  a fault of one flow must not stop the others
                errors.append(failure(kernel, flow.dfid, error))
    return interrupted, errors


def _interrupt(kernel: Kernel, dfid: str, now_ms: int) -> bool:
    """End one flow, unless it has ended meanwhile: its holder may only be late, or another process may recover, too."""
    with kernel.store.transaction():
        orphan = bool(kernel.store.value("SELECT state FROM decision_flows WHERE dfid = ?", (dfid,)) == "ACTIVE")
        if orphan:
            restarts_max = kernel.contract.retry.restarts_max
            undecided.interrupt(kernel.store, dfid, restarts_max=restarts_max, now_ms=now_ms)
    return orphan

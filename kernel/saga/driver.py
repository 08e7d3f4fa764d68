"""Drives a saga to its end: reads from the record what comes next, does it, and reads again.

The runtime does not reason about recovery. The caller passes in who decides a step and who chooses from the menu.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sds.kernel.errors import EventError, SdsError, UsageError
from sds.kernel.executor.wholeness import RECORD_BEHIND
from sds.kernel.flow import decision_record, states
from sds.kernel.flow.in_flight import accepted_as
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import DEADLINE_EXCEEDED, NOT_DECIDED, WAITING_TAGS, Answer
from sds.kernel.saga import compensation
from sds.kernel.saga import state as saga
from sds.kernel.saga.kernels import ALERT_HUMAN, CLOSE_ALL, ChildKernel, MenuKernel, StepKernel, stopped
from sds.kernel.saga.state import COMPENSATED, DIRTY, Saga, SagaAnswer

INTERRUPTED = "INTERRUPTED"  # why no further step is taken, unless a step's own end says why
ROUNDS_MAX = 200  # far above steps x restarts; a saga that needs more is stuck

Ask = Callable[[ChildKernel, Event], Answer]


def drive(kernel: Kernel, dfid: str, ask: Ask, *, now_ms: Callable[[], int]) -> SagaAnswer:
    """Bring a saga to its end. `ask(kernel, event)` decides one child flow and returns its answer, final or waiting.

    A saga whose child waits (`states.WAITING_TAGS`) stays open and may be driven again, until its deadline. After that no
    step is taken, and what was done is undone. A saga also stays open while the outside has accepted a step or a reversal and
    not carried it out yet, whatever its deadline. While the record may lack orders (`Wholeness`) no saga ends and nothing is
    undone: a step that seems not to have begun may have been carried out. Raises WorldError when a child stays busy
    elsewhere; the saga stays open then, too.
    """
    for _ in range(ROUNDS_MAX):
        found = saga.load(kernel.store, kernel.contract, dfid)
        if found.phase == "ENDED" or found.accepted or not _moves(kernel, found, ask, now_ms):
            return saga.saga_answer(kernel.store, kernel.contract, dfid)
    raise SdsError(f"saga `{dfid}` has not ended after {ROUNDS_MAX} rounds", dfid=dfid)


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why no further step is taken. `stopped`: authority was withdrawn; the case is not the reason."""

    code: str
    stopped: bool = False


def _ending(kernel: Kernel, found: Saga, now_ms: int) -> _Ending | None:
    """Return why no further step may be taken; None: one is due, or is being decided."""
    child = found.next
    if child is None or child.became not in ("NOT_BEGUN", "OPEN", "RESTARTABLE"):
        return _Ending(INTERRUPTED)
    if child.became == "OPEN":
        return None
    if (code := stopped(kernel, found.dfid)) is not None:
        return _Ending(code, stopped=True)
    if saga.is_adopted_elsewhere(kernel.store, kernel.contract, found):
        return _Ending(INTERRUPTED)
    if found.late(now_ms):
        return _Ending(DEADLINE_EXCEEDED if found.done else NOT_DECIDED)
    return None


def _moves(kernel: Kernel, found: Saga, ask: Ask, now_ms: Callable[[], int]) -> bool:
    """Do what comes next. Return False where the saga has to wait."""
    ending = _ending(kernel, found, now_ms()) if found.phase == "STEPS" else None
    if found.phase == "STEPS" and ending is None:
        try:
            said = _step(kernel, found, ask)
            return not _waits(said) or found.late(now_ms())
        except EventError as error:  # another event has this child's id
            ending = _Ending(error.reason_code)
    if kernel.whole.doubt() is not None:
        return False
    if ending is not None:
        saga.close_steps(kernel, found.dfid, ending.code, stopped=ending.stopped, now_ms=now_ms())
        return True
    return _compensate(kernel, found, ask, now_ms)


def _waits(said: Answer | None) -> bool:
    return said is not None and said.retryable and said.tag in WAITING_TAGS


def _step(kernel: Kernel, found: Saga, ask: Ask) -> Answer | None:
    """Have the next step decided; return the answer. Raises EventError where another event has its id."""
    if (child := found.next) is None:
        return None
    step = StepKernel(kernel, found, child.number)
    return _ask(step, step.event, ask)


def _ask(kernel: ChildKernel, event: Event, ask: Ask) -> Answer | None:
    """Return a child's answer; None: the saga has moved on meanwhile."""
    try:
        return ask(kernel, event)
    except UsageError as error:
        if error.reason_code != saga.MOVED_ON:
            raise
        return None


def _compensate(kernel: Kernel, found: Saga, ask: Ask, now_ms: Callable[[], int]) -> bool:
    """Ask once what to do about a partial success, unless only the human is left; then do it. Return False where the saga
    has to wait.
    """
    menu = MenuKernel(kernel, found)
    if found.chooser.became == "OPEN":
        return not _waits(_ask(menu, menu.event, ask))
    if found.chooser.became not in ("NOT_BEGUN", "RESTARTABLE"):
        return carry_out(kernel, found, now_ms=now_ms())
    if not stopped(kernel, found.dfid) and menu.possible() != (ALERT_HUMAN,):
        with suppress(EventError):
            return not _waits(_ask(menu, menu.event, ask))
    alert(kernel, found, ALERT_HUMAN, now_ms())
    return True


def carry_out(kernel: Kernel, found: Saga, *, now_ms: int) -> bool:
    """Do what was chosen. When that fails the saga stays dirty, for a human. Return False where the outside has accepted a
    reversal and not carried it out yet: the rest is undone after it; and where the record may lack orders.
    """
    choice = found.choice or ALERT_HUMAN
    undone = "" if choice == ALERT_HUMAN else _undo(kernel, found, choice, now_ms)
    if undone in ("PENDING", RECORD_BEHIND):
        return False
    if undone != "REVERTED":
        alert(kernel, found, choice, now_ms)
        return True
    with kernel.store.transaction():
        now = saga.load(kernel.store, kernel.contract, found.dfid)
        if now.phase == "DIRTY" and kernel.whole.holds:
            saga.end(kernel.store, now, "ABORTED", COMPENSATED, compensation=choice, now_ms=now_ms)
    return True


def _undo(kernel: Kernel, found: Saga, choice: str, now_ms: int) -> str:
    """For CLOSE_ALL void what is open; then undo what was done, the latest step first. Return REVERTED once all is undone,
    else what became of the first reversal that is not; "" where a step's end is not known.
    """
    if choice == CLOSE_ALL and stopped(kernel, found.dfid) is None:
        for child in found.unclear:
            order = decision_record.read_order(kernel.store, child.dfid)
            if order is not None:
                kernel.dispatcher.resolve(order, lambda _: False)
    now = saga.load(kernel.store, kernel.contract, found.dfid)
    if now.unclear:
        return ""
    for child in reversed(now.done):
        status = compensation.reverse(kernel, now.dfid, child.dfid, now_ms=now_ms)
        if status != "REVERTED":
            return status
    return "REVERTED"


def alert(kernel: Kernel, found: Saga, choice: str, now_ms: int) -> None:
    """Leave everything as it is, for a human: the saga ends ESCALATED and keeps its tag."""
    with kernel.store.transaction():
        now = saga.load(kernel.store, kernel.contract, found.dfid)
        if not kernel.whole.holds:
            return
        if now.phase == "DIRTY" and not now.open_child and (now.choice or ALERT_HUMAN) == choice:
            saga.end(kernel.store, now, "ESCALATED", DIRTY, compensation=choice, now_ms=now_ms)


def recover(
    kernel: Kernel, *, now_ms: int, is_due: Callable[[str], bool] = lambda _: True
) -> tuple[int, int, list[tuple[str, Exception]]]:
    """End every saga whose driver is gone (see `_driven`). Return how many have ended, how many a driver with a model must
    take on (`waiting`), and those that could not be recovered, with the error: these stay as they were and do not stop the
    others.

    No further step is taken: a saga in the middle is complete, or nothing was done, or it is dirty; it is left to a driver
    where the outside had only accepted its last step (`_carries_on`). A choice that was made from the menu is carried out. A
    new choice takes a model, which the next driver has. Nothing ends while the record may lack orders. `is_due`: whether to
    look up the reversal of a step now.
    """
    failed = list[tuple[str, Exception]]()
    ended = 0
    for found in _unfinished(kernel, now_ms, driven=False, failed=failed):
        try:
            if not _carries_on(kernel, found) and kernel.whole.doubt() is None:
                ended += _settle(kernel, found.dfid, now_ms, is_due) == "ENDED"
        except Exception as error:  # noqa: BLE001  a fault of one saga must not stop the others
            failed.append((found.dfid, error))
    failed += compensation.look_again(kernel, now_ms=now_ms, is_due=is_due)
    return ended, len(waiting(kernel, now_ms=now_ms)), failed


def _settle(kernel: Kernel, dfid: str, now_ms: int, is_due: Callable[[str], bool]) -> str:
    saga.close_steps(kernel, dfid, INTERRUPTED, stopped=False, now_ms=now_ms)
    found = saga.load(kernel.store, kernel.contract, dfid)
    if found.phase == "DIRTY" and found.chooser.became == "NOTHING" and not found.accepted:
        begun = compensation.under_way(kernel.store, dfid)
        if begun is None or is_due(begun):
            carry_out(kernel, found, now_ms=now_ms)
    return saga.load(kernel.store, kernel.contract, dfid).phase


def waiting(kernel: Kernel, *, now_ms: int) -> list[str]:
    """Return the sagas whose driver is gone and which a driver with a model must take on, oldest first: their compensation
    is still to be chosen, or a step is due after one that the outside had only accepted. None while the record may lack
    orders.
    """
    gone = _unfinished(kernel, now_ms, driven=False)
    found = [each.dfid for each in gone if _needs_choice(each) or _carries_on(kernel, each)]
    return found if found and kernel.whole.doubt() is None else []


def _needs_choice(found: Saga) -> bool:
    return found.phase == "DIRTY" and found.chooser.became != "NOTHING" and not found.accepted


def _carries_on(kernel: Kernel, found: Saga) -> bool:
    """Tell whether a step is due after one that the outside had only accepted at first: its driver did not wait for that."""
    due = found.phase == "STEPS" and found.next is not None and found.next.became in ("NOT_BEGUN", "RESTARTABLE")
    return due and bool(found.done) and accepted_as(kernel.store, found.done[-1].dfid) is not None


def driven(kernel: Kernel, *, now_ms: int) -> int:
    """Return how many unfinished sagas are left alone because their driver may still be alive."""
    return len(_unfinished(kernel, now_ms, driven=True))


def _unfinished(
    kernel: Kernel, now_ms: int, *, driven: bool, failed: list[tuple[str, Exception]] | None = None
) -> list[Saga]:
    """Return the unfinished sagas whose driver may be alive (`driven`), or is gone (not `driven`), oldest first. One that
    cannot be read is appended to `failed` instead.
    """
    rows = kernel.store.rows(
        "SELECT s.dfid FROM sagas s CROSS JOIN decision_flows f ON f.dfid = s.dfid"  # CROSS: open sagas first, by index
        " WHERE s.phase <> 'ENDED' AND f.gate = ? ORDER BY f.created_at_ms",
        (kernel.contract.gate,),
    )
    found = list[Saga]()
    for (dfid,) in rows:
        try:
            each = saga.load(kernel.store, kernel.contract, dfid)
            if _driven(kernel, each, now_ms) == driven:
                found.append(each)
        except Exception as error:  # noqa: BLE001  a damaged row may raise anything
            if failed is not None:
                failed.append((dfid, error))
    return found


def _driven(kernel: Kernel, found: Saga, now_ms: int) -> bool:
    """Tell whether a saga's driver may still be alive: each of its flows speaks for it for twice its lease.

    One lease for the flow itself, and one for the pause after it, until the next flow begins. A step that used up its lease
    would leave no time for that pause, and a saga cut off there is half done. No driver waits for a step that the outside has
    accepted.
    """
    begun = [child for child in found.steps if child.answer is not None]
    if found.chooser.answer is None and begun and accepted_as(kernel.store, begun[-1].dfid) is not None:
        return False
    dfids = (found.dfid, *(child.dfid for child in (*found.steps, found.chooser)))
    rows = kernel.store.rows(
        f"SELECT created_at_ms, lease_until_ms FROM decision_flows WHERE dfid IN ({', '.join('?' for _ in dfids)})",
        dfids,
    )
    return any(states.is_held(begun_ms, 2 * until_ms - begun_ms, now_ms) for begun_ms, until_ms in rows)

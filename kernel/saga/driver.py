"""Drives a saga to its end: reads from the record what comes next, does it, and reads again.

The runtime does not reason about recovery. The caller passes in who decides a step and who chooses from the menu.
"""

from __future__ import annotations

from collections.abc import Callable

from sds.kernel.errors import EventError, SdsError, UsageError
from sds.kernel.flow import decision_record, states
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
    step is taken, and what was done is undone. Raises WorldError when a child stays busy elsewhere; the saga stays open
    then, too.
    """
    for _ in range(ROUNDS_MAX):
        found = saga.load(kernel.store, kernel.contract, dfid)
        if found.phase == "ENDED":
            return saga.saga_answer(kernel.store, kernel.contract, dfid)
        move = _step if found.phase == "STEPS" else _compensate
        said = move(kernel, found, ask, now_ms)
        late = found.phase == "STEPS" and found.late(now_ms())
        if said is not None and said.retryable and said.tag in WAITING_TAGS and not late:
            return saga.saga_answer(kernel.store, kernel.contract, dfid)
    raise SdsError(f"saga `{dfid}` has not ended after {ROUNDS_MAX} rounds", dfid=dfid)


def _step(kernel: Kernel, found: Saga, ask: Ask, now_ms: Callable[[], int]) -> Answer | None:
    """Take the next step, or end the steps. Return the answer, if a decision was asked for."""
    child, code = found.next, stopped(kernel, found.dfid)
    if child is None or child.became not in ("NOT_BEGUN", "OPEN", "RESTARTABLE"):
        _close_steps(kernel, found, INTERRUPTED, now_ms)
    elif code is not None and child.became != "OPEN":
        _close_steps(kernel, found, code, now_ms, stopped=True)
    elif found.late(now_ms()) and child.became != "OPEN":
        _close_steps(kernel, found, DEADLINE_EXCEEDED if found.done else NOT_DECIDED, now_ms)
    else:
        step = StepKernel(kernel, found, child.number)
        try:
            return _ask(step, step.event, ask)
        except EventError as error:  # another event has this child's id
            _close_steps(kernel, found, error.reason_code, now_ms)
    return None


def _close_steps(kernel: Kernel, found: Saga, code: str, now_ms: Callable[[], int], *, stopped: bool = False) -> None:
    saga.close_steps(kernel.store, kernel.contract, found.dfid, code, stopped=stopped, now_ms=now_ms())


def _ask(kernel: ChildKernel, event: Event, ask: Ask) -> Answer | None:
    """Return a child's answer; None: the saga has moved on meanwhile."""
    try:
        return ask(kernel, event)
    except UsageError as error:
        if error.reason_code != saga.MOVED_ON:
            raise
        return None


def _compensate(kernel: Kernel, found: Saga, ask: Ask, now_ms: Callable[[], int]) -> Answer | None:
    """Ask once what to do about a partial success, unless only the human is left; then do it."""
    menu = MenuKernel(kernel, found)
    if found.chooser.became == "OPEN":
        return _ask(menu, menu.event, ask)
    if found.chooser.became in ("NOT_BEGUN", "RESTARTABLE"):
        if stopped(kernel, found.dfid) or menu.possible() == (ALERT_HUMAN,):
            alert(kernel, found, ALERT_HUMAN, now_ms())
            return None
        try:
            return _ask(menu, menu.event, ask)
        except EventError:
            alert(kernel, found, ALERT_HUMAN, now_ms())
    else:
        carry_out(kernel, found, now_ms=now_ms())
    return None


def carry_out(kernel: Kernel, found: Saga, *, now_ms: int) -> None:
    """Do what was chosen. When that fails the saga stays dirty, for a human."""
    choice = found.choice or ALERT_HUMAN
    undone = choice != ALERT_HUMAN and _undo(kernel, found, choice, now_ms)
    if not undone:
        alert(kernel, found, choice, now_ms)
        return
    with kernel.store.transaction():
        now = saga.load(kernel.store, kernel.contract, found.dfid)
        if now.phase == "DIRTY":
            saga.end(kernel.store, now, "ABORTED", COMPENSATED, compensation=choice, now_ms=now_ms)


def _undo(kernel: Kernel, found: Saga, choice: str, now_ms: int) -> bool:
    """For CLOSE_ALL void what is open; then undo what was done, the latest step first. Return whether all is undone."""
    if choice == CLOSE_ALL and stopped(kernel, found.dfid) is None:
        for child in found.unclear:
            order = decision_record.read_order(kernel.store, child.dfid)
            if order is not None:
                kernel.dispatcher.resolve(order, lambda _: False)
    now = saga.load(kernel.store, kernel.contract, found.dfid)
    if now.unclear:
        return False
    for child in reversed(now.done):
        status = compensation.reverse(kernel, now.dfid, child.dfid, now_ms=now_ms)
        if status != "REVERTED":
            return False
    return True


def alert(kernel: Kernel, found: Saga, choice: str, now_ms: int) -> None:
    """Leave everything as it is, for a human: the saga ends ESCALATED and keeps its tag."""
    with kernel.store.transaction():
        now = saga.load(kernel.store, kernel.contract, found.dfid)
        if now.phase == "DIRTY" and not now.open_child and (now.choice or ALERT_HUMAN) == choice:
            saga.end(kernel.store, now, "ESCALATED", DIRTY, compensation=choice, now_ms=now_ms)


def recover(
    kernel: Kernel, *, now_ms: int, is_due: Callable[[str], bool] = lambda _: True
) -> tuple[int, int, list[tuple[str, Exception]]]:
    """End every saga whose driver is gone (see `_driven`). Return how many have ended, how many wait, dirty, for their
    compensation, and those that could not be recovered, with the error: these stay as they were and do not stop the others.

    No further step is taken: a saga in the middle is complete, or nothing was done, or it is dirty. A choice that was made
    from the menu is carried out. A new choice takes a model, which the next driver has. `is_due`: whether to look up the
    reversal of a step now.
    """
    left, failed = list[str](), list[tuple[str, Exception]]()
    for found in _unfinished(kernel, now_ms, driven=False, failed=failed):
        try:
            left.append(_settle(kernel, found.dfid, now_ms))
        except Exception as error:  # noqa: BLE001  a fault of one saga must not stop the others
            failed.append((found.dfid, error))
    failed += compensation.look_again(kernel, now_ms=now_ms, is_due=is_due)
    return left.count("ENDED"), left.count("DIRTY"), failed


def _settle(kernel: Kernel, dfid: str, now_ms: int) -> str:
    saga.close_steps(kernel.store, kernel.contract, dfid, INTERRUPTED, stopped=False, now_ms=now_ms)
    found = saga.load(kernel.store, kernel.contract, dfid)
    if found.phase == "DIRTY" and found.chooser.became == "NOTHING":
        carry_out(kernel, found, now_ms=now_ms)
    return saga.load(kernel.store, kernel.contract, dfid).phase


def waiting(kernel: Kernel, *, now_ms: int) -> list[str]:
    """Return the dirty sagas whose driver is gone, oldest first: their compensation is still to be chosen."""
    return [found.dfid for found in _unfinished(kernel, now_ms, driven=False) if found.phase == "DIRTY"]


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
    would leave no time for that pause, and a saga cut off there is half done.
    """
    dfids = (found.dfid, *(child.dfid for child in (*found.steps, found.chooser)))
    rows = kernel.store.rows(
        f"SELECT created_at_ms, lease_until_ms FROM decision_flows WHERE dfid IN ({', '.join('?' for _ in dfids)})",
        dfids,
    )
    return any(states.is_held(begun_ms, 2 * until_ms - begun_ms, now_ms) for begun_ms, until_ms in rows)

"""From the bytes of an event to the answer of its request: what is known, whether there is room, and the wait."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import orjson
from starlette.concurrency import run_in_threadpool

from sds.kernel.errors import SdsError
from sds.kernel.flow.intake import Event, flow_named
from sds.kernel.flow.states import DEADLINE_EXCEEDED, NOT_DECIDED, Answer
from sds.service.deciding.idempotency import KeptAnswer, KeptAnswers, KeyClaim, claim_of
from sds.service.deciding.terms import Terms
from sds.service.gates import OpenGate
from sds.service.problems import Problem
from sds.service.state import Service
from sds.submission import Handle

LOOK_S, LOOK_S_MAX, ELSEWHERE_S_MAX = 0.005, 0.1, 0.25
AMPLE_MS, SHORT_BYTES = 25, 8 * 1024
GRACE_MS = 100  # beyond its deadline a decision has so long to say that it passed
_OK = 200
_ENDED = {"DRAINING": "DRAINING", "QUEUE_FULL": "QUEUE_FULL"}  # why a flow ended NOT_DECIDED, where it was not for time


@dataclass(frozen=True, slots=True)
class DecisionReply:
    """What a request is answered with. `retryable`: the event may be decided afresh. `replayed`: it was answered so before, under
    the same key.
    """

    status: int
    dfid: str
    body: bytes
    retryable: bool = False
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One request for a decision. `arrived_s`: by `time.monotonic`."""

    gate: OpenGate
    caller: str
    body: bytes
    terms: Terms
    arrived_s: float

    @property
    def left_ms(self) -> int:
        """How much of its time is left."""
        whole = self.terms.deadline_ms or self.gate.deadline_ms_max
        return whole - self._gone_ms

    @property
    def wait_ms(self) -> int:
        """How much longer its answer is waited for: without a deadline as long as a decision and its order may take."""
        return (self.terms.deadline_ms or self.gate.answer_ms_max) - self._gone_ms

    @property
    def _gone_ms(self) -> int:
        return int(1_000 * (time.monotonic() - self.arrived_s))


@dataclass(frozen=True, slots=True)
class _Begun:
    """What was found or begun: an answer already, or one to wait for. `elsewhere`: the flow that another process decides."""

    claim: KeyClaim | None = None
    answered: DecisionReply | None = None
    handle: Handle | None = None
    elsewhere: str = ""


async def decide(service: Service, request: DecisionRequest) -> DecisionReply:
    """Return what answers a request. Raises Problem and SdsError: then nothing is kept under its key."""
    if _may_begin_here(service, request):
        begun = _begin_here(service, request)
    else:
        if (crowded := service.admission.crowded()) is not None:
            raise crowded
        with service.admission.looking():
            begun = await run_in_threadpool(_begin, service, request)
    if begun.elsewhere:
        begun = await _once_free(service, request, begun.elsewhere)
    if begun.answered is not None:
        return begun.answered
    if begun.handle is None:
        raise AssertionError  # it is one or the other
    try:
        if request.terms.respond_async:
            decided = await _accepted(request, begun.handle)
        else:
            decided = _of_answer(await _answer_in_own_time(service, request, begun.handle))
    except Exception:
        if begun.claim is not None:
            await run_in_threadpool(service.kept.release, begun.claim)
        raise
    return decided if begun.claim is None else await run_in_threadpool(_kept, service.kept, begun.claim, decided)


async def _once_free(service: Service, request: DecisionRequest, dfid: str) -> _Begun:
    """Begin anew once no other process is at work on an event any more: meanwhile no thread that decides waits for it.

    Raises Problem where that is not so in time, or too many wait so.
    """
    wait_s = LOOK_S
    with service.admission.waiting_elsewhere():
        while True:
            left_s = request.wait_ms / 1_000
            if left_s <= 0:
                raise await _in_progress(request, dfid)
            await asyncio.sleep(min(wait_s, left_s))
            begun = await run_in_threadpool(_begin, service, request)
            if not begun.elsewhere:
                return begun
            wait_s = min(ELSEWHERE_S_MAX, 2 * wait_s)


def _may_begin_here(service: Service, request: DecisionRequest) -> bool:
    """Tell whether a request may go to a deciding thread by way of no other: one is idle, there is time, nothing to look up
    under a key, and no long text to read on the event loop. What would be refused is looked up first: it may be known.
    """
    ample = len(request.body) <= SHORT_BYTES and request.left_ms >= AMPLE_MS and request.terms.key is None
    return ample and service.admission.idle and service.admission.refusal(request.gate.name, request.left_ms) is None


def _begin_here(service: Service, request: DecisionRequest) -> _Begun:
    """Have an event decided, or found to be known, by a thread that is idle. Called on the event loop."""
    if request.terms.traceparent:
        service.traced(request.gate.name, request.gate.gate.read(request.body).id, request.terms.traceparent)
    return _entered(service, request)


def _begin(service: Service, request: DecisionRequest) -> _Begun:
    """Answer by reading alone where that can be; else take a place, claim the key and submit the event."""
    gate = request.gate.gate
    event = gate.read(request.body)
    service.traced(request.gate.name, event.id, request.terms.traceparent)
    claim = None if request.terms.key is None else claim_of(request.caller, gate, request.terms.key, event)
    found = None if claim is None else service.kept.find(claim, gate, event)
    if found is not None and found.status == _OK:
        return _Begun(claim, _replayed(found))
    known = gate.kernel.known(event)
    if claim is not None and found is not None:
        if known is not None:
            return _Begun(claim, _replayed(found))
        service.kept.forget(claim, found)  # it was taken and ended undecided: the event may be decided afresh
    if known is not None and not known.pending:
        decided = _of_answer(known)
        return _Begun(claim, decided if claim is None else _keep_known(service.kept, claim, request, event, decided))
    waits = known is not None and known.state == "ACTIVE" and not request.terms.respond_async
    if known is not None and waits and not service.decides(known.dfid):
        return _Begun(elsewhere=known.dfid)
    if request.left_ms <= 0:
        raise Problem("NOT_DECIDED", "the deadline passed before the event was there")
    return _entered(service, request, claim)


def _entered(service: Service, request: DecisionRequest, claim: KeyClaim | None = None) -> _Begun:
    """Take a place, claim the key and submit the event. Raises Problem where there is no place."""
    leave = service.admission.enter(request.gate.name, request.left_ms)
    try:
        begun = _submitted(service, request, claim)
    except BaseException:
        leave()
        raise
    if begun.handle is None:
        leave()
    else:
        begun.handle.future.add_done_callback(lambda _: leave())
    return begun


def _submitted(service: Service, request: DecisionRequest, claim: KeyClaim | None) -> _Begun:
    gate = request.gate.gate
    if claim is not None and (found := service.kept.claim(claim, gate, gate.read(request.body))) is not None:
        return _Begun(claim, _replayed(found))
    try:
        deadline_ms = None if request.terms.deadline_ms is None else max(1, request.left_ms)
        handle = gate.submit(request.body, deadline_ms=deadline_ms)
    except BaseException:
        if claim is not None:
            service.kept.release(claim)
        raise
    return _Begun(claim, handle=handle)


async def _answer_in_own_time(service: Service, request: DecisionRequest, handle: Handle) -> Answer:
    """Wait for a decision. Where it ended for the deadline of whoever had asked before, and this request has time left, it is
    decided afresh, once. Raises as `_answer` and `_entered`.
    """
    answer = await _answer(request, handle)
    late = answer.retryable and answer.reason_code == DEADLINE_EXCEEDED
    if late and request.left_ms > 0:
        again = await run_in_threadpool(_entered, service, request)
        return answer if again.handle is None else await _answer(request, again.handle)
    return answer


async def _answer(request: DecisionRequest, handle: Handle) -> Answer:
    """Wait for a decision; one that goes on beyond the request's time is let go. Raises what it raises, and Problem where
    others wait for it, or it may have been committed.
    """
    whole_ms = request.left_ms if request.terms.deadline_ms else request.gate.answer_ms_max
    await _wait(handle.future, max(0, whole_ms + GRACE_MS) / 1_000)
    return await _ended(request, handle)


async def _ended(request: DecisionRequest, handle: Handle) -> Answer:
    """Return the answer that is there; let go of a decision that is not."""
    future = handle.future
    if not future.done() and await run_in_threadpool(handle.cancel):
        await _wait(future, GRACE_MS / 1_000)
    if not future.done():
        raise await _in_progress(request)
    try:
        return future.result()
    except SdsError as error:
        if error.reason_code == "FLOW_IN_PROGRESS":
            raise (await _in_progress(request, error.dfid)) from error
        raise


async def _wait(future: Future[Answer], seconds: float) -> None:
    """Wait until a future is done, `seconds` at most: on the loop by one callback, and whoever waits cancels nothing."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def done(_: Future[Answer]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(end)

    timer = loop.call_later(seconds, end)
    future.add_done_callback(done)
    try:
        await over
    finally:
        timer.cancel()


async def _accepted(request: DecisionRequest, handle: Handle) -> DecisionReply:
    """Wait until the event has a flow that is on record, and name it: what was acknowledged is not lost. Raises as `_answer`."""
    future, wait_s = handle.future, LOOK_S
    while not future.done() and request.wait_ms > 0:
        known = await run_in_threadpool(request.gate.gate.known, request.body)
        if known is not None:
            return _of_answer(known, 202)
        await _wait(future, wait_s)
        wait_s = min(LOOK_S_MAX, 2 * wait_s)
    return _of_answer(await _ended(request, handle), 202)


def _of_answer(answer: Answer, status: int = 200) -> DecisionReply:
    """Return what tells an answer. Raises Problem for one that says that nobody has decided."""
    if answer.state == "ABORTED" and answer.tag == NOT_DECIDED:
        raise Problem(_ENDED.get(answer.reason_code or "", NOT_DECIDED), dfid=answer.dfid)
    return DecisionReply(status, answer.dfid, orjson.dumps(answer.as_data()), answer.retryable)


def _keep_known(
    kept: KeptAnswers, claim: KeyClaim, request: DecisionRequest, event: Event, decided: DecisionReply
) -> DecisionReply:
    """Keep under a new key what its event was answered before."""
    found = kept.claim(claim, request.gate.gate, event)
    return _replayed(found) if found is not None else _kept(kept, claim, decided)


def _kept(kept: KeptAnswers, claim: KeyClaim, decided: DecisionReply) -> DecisionReply:
    """Keep an answer; what may be decided afresh is not kept."""
    if decided.retryable:
        kept.release(claim)
        return decided
    first = kept.keep(claim, KeptAnswer(decided.status, decided.dfid, decided.body))
    return decided if first.body == decided.body else _replayed(first)


def _replayed(found: KeptAnswer) -> DecisionReply:
    return DecisionReply(found.status, found.dfid, found.body, replayed=True)


def _named(request: DecisionRequest) -> str:
    gate, kernel = request.gate.gate, request.gate.gate.kernel
    return flow_named(kernel.store, kernel.contract, gate.read(request.body), now_ms=kernel.now_ms)


async def _in_progress(request: DecisionRequest, dfid: str = "") -> Problem:
    """Return the problem that names the flow of an event, or the one that it will have where it waits for its turn still."""
    dfid = dfid or await run_in_threadpool(_named, request)
    return Problem("FLOW_IN_PROGRESS", dfid=dfid, headers={"Location": f"/v1/decisions/{dfid}"})

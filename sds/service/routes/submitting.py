"""Answer a request for a decision from its event's bytes: look the event up, admit and submit it, and wait for the answer."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson
from starlette.concurrency import run_in_threadpool

from sds.kernel.errors import SdsError
from sds.kernel.flow.intake import Event, flow_named
from sds.kernel.flow.states import DEADLINE_EXCEEDED, NOT_DECIDED, Answer
from sds.service.deciding.idempotency import KeptAnswer, KeptAnswers, KeyClaim, claim_of
from sds.service.deciding.terms import Terms
from sds.service.gates import OpenGate
from sds.service.problems import Problem
from sds.service.reasons import code_of
from sds.service.state import Service
from sds.submission import Handle

LOOK_S, LOOK_S_MAX, ELSEWHERE_S_MAX = 0.005, 0.1, 0.25
AMPLE_MS, SHORT_BYTES = 25, 8 * 1024
GRACE_MS = 100  # time after its deadline for a decision to report that the deadline passed
_OK = 200
SUPERSEDED = "the record has a newer version of the gate's contract than this process: nothing was written"
SUPERSEDED_S = 1.0  # `Retry-After` of what another process may take at once
ELSEWHERE = {"Connection": "close"}  # else a caller that keeps its connection asks this process again
# other reasons than its deadline why a flow ended NOT_DECIDED
_NOT_FOR_TIME = {
    "DRAINING": "the service is being stopped",
    "QUEUE_FULL": "too many decisions wait for the model",
    "MODEL_UNAVAILABLE": "the model is down",
}


@dataclass(frozen=True, slots=True)
class DecisionReply:
    """The answer to a request. `retryable`: the event may be decided afresh. `replayed`: the same key's first answer."""

    status: int
    dfid: str
    body: bytes
    retryable: bool = False
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One request for a decision. `caller`: the key's name; `arrived_s`: by `time.monotonic`."""

    gate: OpenGate
    caller: str
    body: bytes
    terms: Terms
    arrived_s: float

    @property
    def left_ms(self) -> int:
        """The time left to decide, in milliseconds; negative once the deadline has passed."""
        whole = self.terms.deadline_ms or self.gate.deadline_ms_max
        return whole - self._gone_ms

    @property
    def wait_ms(self) -> int:
        """The time left to wait for the answer. Without a deadline of the request it includes the order's dispatch."""
        return (self.terms.deadline_ms or self.gate.answer_ms_max) - self._gone_ms

    @property
    def _gone_ms(self) -> int:
        return int(1_000 * (time.monotonic() - self.arrived_s))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A begun request: `answered` already, a `handle` to wait for, or the flow that another process decides (`elsewhere`)."""

    claim: KeyClaim | None = None
    answered: DecisionReply | None = None
    handle: Handle | None = None
    elsewhere: str = ""


async def decide(service: Service, request: DecisionRequest) -> DecisionReply:
    """Return the answer to a request. Raises Problem, SdsError; then nothing is kept under its key."""
    if _may_begin_here(service, request):
        begun = _begin_here(service, request)
    else:
        if (crowded := service.admission.crowded()) is not None:
            raise crowded
        with service.admission.looking():
            begun = await run_in_threadpool(_begin, service, request)
    if begun.elsewhere:
        begun = await _begin_once_free(service, request, begun.elsewhere)
    if begun.answered is not None:
        return begun.answered
    if begun.handle is None:
        raise AssertionError  # a request that is not answered has a handle
    try:
        if request.terms.respond_async:
            decided = await _on_record(request, begun.handle)
        else:
            decided = _reply_of(await _answer_in_own_time(service, request, begun.handle))
    except Exception:
        if begun.claim is not None:
            await run_in_threadpool(service.kept.release, begun.claim)
        raise
    return decided if begun.claim is None else await run_in_threadpool(_keep, service.kept, begun.claim, decided)


async def _begin_once_free(service: Service, request: DecisionRequest, dfid: str) -> _Begun:
    """Wait until no other process decides the event, then begin. No deciding thread waits meanwhile.

    Raises Problem where the request's time ends before, or too many requests wait like this.
    """
    wait_s = LOOK_S
    with service.admission.waiting_elsewhere():
        while True:
            left_s = request.wait_ms / 1_000
            if left_s <= 0:
                raise _in_progress(dfid)
            await asyncio.sleep(min(wait_s, left_s))
            begun = await run_in_threadpool(_begin, service, request)
            if not begun.elsewhere:
                return begun
            wait_s = min(ELSEWHERE_S_MAX, 2 * wait_s)


def _may_begin_here(service: Service, request: DecisionRequest) -> bool:
    """Tell whether the event loop may submit a request itself: a deciding thread is idle, there is ample time, it has no key
    to look up and no long body to parse. An event that would be refused is looked up in a thread first: it may be known.
    """
    ample = len(request.body) <= SHORT_BYTES and request.left_ms >= AMPLE_MS and request.terms.key is None
    admitted = service.admission.idle and service.admission.refusal(request.gate.name, request.left_ms) is None
    opened, superseded = request.gate.gate, request.gate.name in service.superseded
    blocked = opened.breaker.wait_ms or superseded or opened.kernel.whole.stopped is not None
    return ample and admitted and not blocked


def _begin_here(service: Service, request: DecisionRequest) -> _Begun:
    """Submit an event to an idle deciding thread, which also looks it up. Called on the event loop."""
    if request.terms.traceparent:
        service.traced(request.gate.name, request.gate.gate.read(request.body).id, request.terms.traceparent)
    return _admitted(service, request)


def _begin(service: Service, request: DecisionRequest) -> _Begun:
    """Answer from the record where possible; else admit the request, claim its key and submit its event. Blocks."""
    gate = request.gate.gate
    event = gate.read(request.body)
    service.traced(request.gate.name, event.id, request.terms.traceparent)
    claim = None if request.terms.key is None else claim_of(request.caller, gate, request.terms.key, event)
    kept = None if claim is None else service.kept.find(claim, gate, event)
    if kept is not None and kept.status == _OK:
        return _Begun(claim, _replayed(kept))
    known = gate.kernel.known(event)
    if claim is not None and kept is not None:
        if known is not None:
            return _Begun(claim, _replayed(kept))
        service.kept.forget(claim, kept)  # accepted, but it ended undecided: the event may be decided afresh
    if known is not None and not known.pending:
        decided = _reply_of(known)
        return _Begun(claim, decided if claim is None else _keep_known(service.kept, claim, request, event, decided))
    waits = known is not None and known.state == "ACTIVE" and not request.terms.respond_async
    if known is not None and waits and not service.decides(known.dfid):
        return _Begun(elsewhere=known.dfid)
    if request.left_ms <= 0 and known is not None:
        raise _in_progress(known.dfid)
    if request.left_ms <= 0:
        raise Problem("NOT_DECIDED", "the deadline passed before a decision could begin")
    return _admitted(service, request, claim)


def _admitted(service: Service, request: DecisionRequest, claim: KeyClaim | None = None) -> _Begun:
    """Admit a request, claim its key and submit its event. Raises Problem where it is not admitted, the model is down, the
    record was altered or its key is lost, or this process's contract is superseded: it could only hand the event to a human.
    """
    if (stopped := request.gate.gate.kernel.whole.stopped) is not None:
        raise Problem("NOT_READY", f"{stopped.message}: nothing was written", retry_after_s=SUPERSEDED_S)
    if request.gate.name in service.superseded:
        raise Problem("NOT_READY", SUPERSEDED, retry_after_s=SUPERSEDED_S, headers=ELSEWHERE)
    if wait_ms := request.gate.gate.breaker.wait_ms:
        raise Problem("MODEL_UNAVAILABLE", "the model is down: nothing was written", retry_after_s=wait_ms / 1_000)
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
        begun.handle.future.add_done_callback(partial(_compare_contract, service, request.gate))
    return begun


def _compare_contract(service: Service, gate: OpenGate, future: Future[Answer]) -> None:
    """Look at once where an event was handed over for want of its contract: the next need not wait for the probe."""
    if not future.cancelled() and future.exception() is None and future.result().reason_code == "CONTRACT_REVOKED":
        with suppress(SdsError):
            service.compare_contract(gate)


def _submitted(service: Service, request: DecisionRequest, claim: KeyClaim | None) -> _Begun:
    gate = request.gate.gate
    if claim is not None and (kept := service.kept.claim(claim, gate, gate.read(request.body))) is not None:
        return _Begun(claim, _replayed(kept))
    try:
        deadline_ms = None if request.terms.deadline_ms is None else max(1, request.left_ms)
        handle = gate.submit(request.body, deadline_ms=deadline_ms)
    except BaseException:
        if claim is not None:
            service.kept.release(claim)
        raise
    return _Begun(claim, handle=handle)


async def _answer_in_own_time(service: Service, request: DecisionRequest, handle: Handle) -> Answer:
    """Wait for a decision. Where it ended at the deadline of an earlier request for the event, and this one has time left,
    submit the event once more. Raises as `_answer` and `_admitted` do.
    """
    answer = await _answer(request, handle)
    late = answer.retryable and answer.reason_code == DEADLINE_EXCEEDED
    if late and request.left_ms > 0:
        again = await run_in_threadpool(_admitted, service, request)
        return answer if again.handle is None else await _answer(request, again.handle)
    return answer


async def _answer(request: DecisionRequest, handle: Handle) -> Answer:
    """Wait for a decision until the request's time ends, and cancel it then. Raises what the decision raises, and Problem
    where it cannot be cancelled: others wait for it, or it may have been committed.
    """
    whole_ms = request.left_ms if request.terms.deadline_ms else request.gate.answer_ms_max
    await _wait(handle.future, max(0, whole_ms + GRACE_MS) / 1_000)
    return await _answer_now(request, handle)


async def _answer_now(request: DecisionRequest, handle: Handle) -> Answer:
    """Return a decision's answer, or cancel it where there is none. Raises as `_answer` does.

    Where it ends without a flow of its own, another process may have the event: its answer counts.
    """
    future = handle.future
    if not future.done() and await run_in_threadpool(handle.cancel):
        await _wait(future, GRACE_MS / 1_000)
    if not future.done():
        raise _in_progress(await run_in_threadpool(_flow_of, request))
    try:
        return future.result()
    except SdsError as error:
        if error.reason_code == "FLOW_IN_PROGRESS":
            raise _in_progress(error.dfid or await run_in_threadpool(_flow_of, request)) from error
        known = None if error.dfid or code_of(error) != NOT_DECIDED else await run_in_threadpool(_known, request)
        if known is None:
            raise
        if known.pending:
            raise _in_progress(known.dfid) from error
        return known


async def _wait(future: Future[Answer], seconds: float) -> None:
    """Wait until a future is done, at most `seconds`. It costs the event loop one callback, and never cancels the future."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def done(_: Future[Answer]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end)

    timer = loop.call_later(seconds, end)
    future.add_done_callback(done)
    try:
        await over
    finally:
        timer.cancel()


async def _on_record(request: DecisionRequest, handle: Handle) -> DecisionReply:
    """Wait until the event's flow is on record, so that no accepted event is lost; answer 202. Raises as `_answer`."""
    future, wait_s, gate = handle.future, LOOK_S, request.gate.gate
    while not future.done() and request.wait_ms > 0:
        if await run_in_threadpool(gate.known, request.body) is not None:
            await run_in_threadpool(gate.kernel.store.flush)  # a flow's first commit does not wait for the disk
            known = await run_in_threadpool(gate.known, request.body)  # a server that crashed before may have lost it
            if known is not None:
                return _reply_of(known, 202)
        await _wait(future, wait_s)
        wait_s = min(LOOK_S_MAX, 2 * wait_s)
    return _reply_of(await _answer_now(request, handle), 202)


def _reply_of(answer: Answer, status: int = 200) -> DecisionReply:
    """Return an answer as a reply. Raises Problem where the flow ended NOT_DECIDED."""
    if answer.state == "ABORTED" and answer.tag == NOT_DECIDED:
        code = answer.reason_code if answer.reason_code in _NOT_FOR_TIME else NOT_DECIDED
        why = _NOT_FOR_TIME.get(code, f"nobody decided the event in time ({answer.reason_code})")
        raise Problem(code, f"{why}: the event's flow ended NOT_DECIDED, and nothing was sent", dfid=answer.dfid)
    return DecisionReply(status, answer.dfid, orjson.dumps(answer.as_data()), answer.retryable)


def _keep_known(
    kept: KeptAnswers, claim: KeyClaim, request: DecisionRequest, event: Event, decided: DecisionReply
) -> DecisionReply:
    """Keep the answer of an event that was decided before under a new key; return what to reply."""
    found = kept.claim(claim, request.gate.gate, event)
    return _replayed(found) if found is not None else _keep(kept, claim, decided)


def _keep(kept: KeptAnswers, claim: KeyClaim, decided: DecisionReply) -> DecisionReply:
    """Keep an answer under its key, unless its event may be decided afresh; return what to reply."""
    if decided.retryable:
        kept.release(claim)
        return decided
    first = kept.keep(claim, KeptAnswer(decided.status, decided.dfid, decided.body))
    return decided if first.body == decided.body else _replayed(first)


def _replayed(kept: KeptAnswer) -> DecisionReply:
    return DecisionReply(kept.status, kept.dfid, kept.body, replayed=True)


def _known(request: DecisionRequest) -> Answer | None:
    return request.gate.gate.known(request.body)


def _flow_of(request: DecisionRequest) -> str:
    gate, kernel = request.gate.gate, request.gate.gate.kernel
    return flow_named(kernel.store, kernel.contract, gate.read(request.body), now_ms=kernel.now_ms)


def _in_progress(dfid: str) -> Problem:
    """Return the problem that an event is being decided. It names the event's flow, also one that is not on record yet."""
    return Problem("FLOW_IN_PROGRESS", dfid=dfid, headers={"Location": f"/v1/decisions/{dfid}"})

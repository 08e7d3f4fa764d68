"""What a decision calls runs in its caller's context: spans of OpenTelemetry and names bound for logs reach it."""

from __future__ import annotations

from contextvars import ContextVar

import pytest

from sds.kernel.envelope.state import StateRead
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.attack.testbed import Testbed
from tests.submission.parts import PATIENCE_S

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


class Seeing:
    """The bed's accounts and bank, which note the request they are called for."""

    idempotent = True

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self.seen: list[tuple[str, str]] = []

    def read(self, key: str) -> StateRead | None:
        self.seen.append(("read", REQUEST.get()))
        return self._bed.accounts.read(key)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.seen.append(("dispatch", REQUEST.get()))
        return self._bed.bank.dispatch(intent, key, deadline_s)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._bed.bank.lookup(key, deadline_s)


@pytest.mark.parametrize("how", ["decide", "submit"])
def test_source_and_executor_are_called_in_the_context_of_the_caller(bed: Testbed, how: str):
    seeing = Seeing(bed)
    token = REQUEST.set("R-7")
    try:
        with bed.gate(source=seeing, executor=seeing) as gate:
            answer = gate.decide(bed.event(1)) if how == "decide" else gate.submit(bed.event(1)).result(PATIENCE_S)
    finally:
        REQUEST.reset(token)
    assert "SUCCESS" == answer.execution
    assert {("read", "R-7"), ("dispatch", "R-7")} == set(seeing.seen)


def test_a_caller_does_not_see_the_context_of_the_one_before(bed: Testbed):
    seeing = Seeing(bed)
    with bed.gate(source=seeing, executor=seeing, threads=1) as gate:
        for number, name in enumerate(("R-1", "R-2")):
            token = REQUEST.set(name)
            handle = gate.submit(bed.event(number))
            REQUEST.reset(token)
            handle.result(PATIENCE_S)
    assert ["R-1", "R-2"] == [name for what, name in seeing.seen if what == "dispatch"]

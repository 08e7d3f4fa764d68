"""A process that was forked off has none of the gate's threads: it is refused in one line, and hurts nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.engines.native import NativeEngine
from sds.host.clock import now_ms
from sds.host.paths import decisions_path
from sds.kernel.errors import ModelError, UsageError
from sds.kernel.storage.sqlite import look_at
from sds.models.llamacpp.backend import LlamaBackend
from tests.attack.testbed import Testbed
from tests.submission.parts import PATIENCE_S, Thinking, in_a_fork

FORKED_S_MAX = 20


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_gate_refuses_in_a_forked_process_and_goes_on_in_its_own(tmp_path: Path):
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))
    with bed.gate() as gate:
        gate.submit(bed.event(0)).result(FORKED_S_MAX)

        def ask() -> None:
            for asked in (gate.decide, gate.submit, gate.known):
                with pytest.raises(UsageError, match="the gate was opened by another process") as refused:
                    asked(bed.event(1))
                assert "FORKED" == refused.value.reason_code
            gate.close()

        assert 0 == in_a_fork(ask)
        assert "SUCCESS" == gate.decide(bed.event(1)).execution


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_handle_is_not_waited_for_in_a_forked_process(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        handle = gate.submit(bed.event(0))
        thinking.wait_until_begun()

        def wait() -> None:
            with pytest.raises(UsageError, match="the event was submitted by another process") as refused:
                handle.result(PATIENCE_S)
            assert "FORKED" == refused.value.reason_code

        assert 0 == in_a_fork(wait)
        thinking.done.set()
        assert "SUCCESS" == handle.result(PATIENCE_S).execution


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_handle_is_not_given_up_in_a_forked_process(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        handle = gate.submit(bed.event(0))
        thinking.wait_until_begun()

        def give_up() -> None:
            with pytest.raises(UsageError, match="the event was submitted by another process"):
                handle.cancel()
            handle.future.cancel()

        assert 0 == in_a_fork(give_up)
        thinking.done.set()
        assert "SUCCESS" == handle.result(PATIENCE_S).execution
        assert 0 == in_a_fork(lambda: handle.cancel() and pytest.fail("it had been decided"))


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_gate_that_is_not_in_force_yet_is_not_put_in_force_by_a_forked_process(bed: Testbed):
    with bed.gate(register=False) as gate:

        def register() -> None:
            with pytest.raises(UsageError, match="the gate was opened by another process"):
                gate.register()

        assert 0 == in_a_fork(register)
        gate.register()
        assert "SUCCESS" == gate.decide(bed.event(0)).execution


@pytest.mark.timeout(FORKED_S_MAX)
def test_an_engine_refuses_in_a_forked_process(tiny: LlamaBackend):
    engine = NativeEngine(tiny, now_ms=now_ms)

    def ask() -> None:
        with pytest.raises(ModelError, match="the engine was opened by another process"):
            engine.count_tokens("please")
        engine.close()

    assert 0 == in_a_fork(ask)
    assert engine.count_tokens("please") > 0


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_forked_process_may_open_a_gate_once_the_parent_has_closed_its_own(tmp_path: Path):
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))

    def decide() -> None:
        with bed.gate() as gate:
            assert "SUCCESS" == gate.submit(bed.event(1)).result(FORKED_S_MAX).execution

    with bed.gate() as gate:
        gate.submit(bed.event(0)).result(FORKED_S_MAX)
    assert 0 == in_a_fork(decide)
    with bed.gate() as gate:
        known = gate.known(bed.event(1))
        assert known is not None
        assert "SUCCESS" == known.execution


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_record_that_was_open_at_the_fork_is_not_opened_again_in_the_fork(tmp_path: Path):
    """SQLite would use it there without locks: once the parent closes it, what the fork commits is lost."""
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))

    def open_again() -> None:
        for opened in (bed.gate, lambda: look_at(decisions_path(bed.own))):
            with pytest.raises(UsageError, match="was open when this process was forked") as refused:
                opened()
            assert "FORKED" == refused.value.reason_code
        other = Testbed(tmp_path / "another")
        other.open_accounts(range(5))
        with other.gate() as gate:
            assert "SUCCESS" == gate.decide(other.event(1)).execution

    with bed.gate() as gate:
        gate.decide(bed.event(0))
        assert 0 == in_a_fork(open_again)
        assert "SUCCESS" == gate.decide(bed.event(1)).execution

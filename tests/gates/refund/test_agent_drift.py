"""`--chaos agent-drift`: every denial is within the agent's bounds, and the run is stopped all the same, at the decision shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.cli.common import ChosenGate
from sds.cli.decisions import run as cli
from sds.gates import runner
from sds.gates.refund.chaos import AgentDrift
from sds.gates.refund.gate import gate, load_refund_contract
from sds.host.paths import open_record
from sds.kernel.errors import UsageError
from sds.kernel.registry import registry
from tests.proposers import Greedy

STOPPED_AT = 30  # the window of the monitor `not_eligible`
DENIED = 29  # of the other nobody knows enough: a rule hands it to a human
WHY = "monitor not_eligible: reason_share 0.9667 is over 0.8 in the last 30 decisions, at decision 30"
Drifts = Callable[[int], dict[str, Any]]


def drift(folder: Path, limit: int) -> dict[str, Any]:
    return runner.run(gate, folder, limit=limit, engine=Greedy(), chaos="agent-drift", on_decided=lambda _: None)


def test_the_drifting_agent_is_stopped_at_the_decision_shown_and_its_last_one_stands(folder: Path) -> None:
    report = drift(folder, 40)
    assert (STOPPED_AT, DENIED, STOPPED_AT) == (
        report["decisions"],
        report["drifted"],
        report["stopped_at_decision"],
    )
    assert (0, 0, []) == (report["out_of_envelope"], report["double_payouts"], report["record_faults"])
    assert WHY in report["stopped"][0]
    assert f"stopped at decision {STOPPED_AT}" in AgentDrift.summary(report)
    with closing(open_record(folder)) as store:
        assert DENIED == store.value("SELECT count(*) FROM decision_flows WHERE state = 'CLOSED'")
        known = registry.lookup(store, load_refund_contract().agent_id)
    assert known is not None
    assert "SUSPENDED" == known.status


def test_before_the_window_is_full_the_run_proves_nothing(folder: Path) -> None:
    report = drift(folder, STOPPED_AT - 1)
    assert (0, None) == (report["stopped_at_decision"], report["stopped"])
    assert "drifting agent was stopped" == AgentDrift.missing(report)


def test_the_command_has_kept_its_promise_when_the_agent_was_stopped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run(ChosenGate("refund"), limit=40, chaos="agent-drift")
    assert f"stopped at decision {STOPPED_AT}: the agent stays suspended" in capsys.readouterr().out
    with pytest.raises(UsageError, match="is SUSPENDED, not ACTIVE: monitor not_eligible"):
        cli.run(ChosenGate("refund"), limit=1)


def test_the_command_says_so_when_nothing_was_stopped(folder: Path) -> None:
    with pytest.raises(UsageError, match="no drifting agent was stopped, so this run proves nothing"):
        cli.run(ChosenGate("refund"), limit=3, chaos="agent-drift")

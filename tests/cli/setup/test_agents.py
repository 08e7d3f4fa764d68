"""`sds agents`: what an operator sees of an agent and does to it, all of it on the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.host.paths import decisions_path, open_record
from sds.kernel.audit import verify
from sds.kernel.executor import breaker
from sds.kernel.flow.monitored import decision_monitors
from sds.kernel.registry import registry, windows
from sds.kernel.registry.monitors import MonitoredDecision
from sds.kernel.registry.registry import lookup
from tests.cli.conftest import Shell
from tests.kernel.durable import contract

AGENT = "claims-agent"
HERE = ("--gate", "claims")


@pytest.fixture
def sds(tmp_path: Path) -> Iterator[Shell]:
    """Return a shell in a home of its own, with the record of one gate in it that was deployed and updated."""
    with closing(open_record(tmp_path / "claims")) as store:
        registry.register(store, contract(), by="operator", now_ms=now_ms())
        newer = contract(("1.0.0", "1.1.0"), ("Decide claims.", "Decide all claims."))
        registry.register(store, newer, by="operator", who="Ada\x1b[2J", reason="plainer\nmission", now_ms=now_ms())
    yield Shell(tmp_path)
    with closing(open_record(tmp_path / "claims")) as store:
        assert () == verify.verify(store).faults


def status(sds: Shell) -> str:
    assert decisions_path(sds.home / "claims").exists()
    with closing(open_record(sds.home / "claims")) as store:
        return lookup(store, AGENT).status  # type: ignore[union-attr]


def test_an_agent_is_shown_with_owner_contract_state_budget_and_history(sds: Shell) -> None:
    sds.ok("agents", "suspend", AGENT, "--reason", "too generous", *HERE)
    shown = sds.ok("agents", "show", AGENT, *HERE)
    for line in (
        "agent: claims-agent",
        "gate: claims",
        "owner: desk@example.org",
        "executor: answers",
        "rejections in a row: 0",
        "escalations left: 1000000 of 1000000 an hour",
        "  superseded  registered ",
        "by operator (deployment): deployed",
        "by operator (Ada [2J): plainer mission",
        "INITIALIZING -> ACTIVE  by registry: handshake passed: version 1.0.0, proposal schema 4.0.0",
        "ACTIVE -> SUSPENDED  by operator (",
    ):
        assert line in shown
    assert ": too generous" in next(line for line in shown.splitlines() if line.startswith("status: SUSPENDED since "))
    assert "\x1b" not in shown


MONITORS = """aggregate_thresholds:
  - {name: often, of: approval_rate, window: {last: 10}, warn: 0.5, stop: 0.9}
  - {name: spent, of: paid_sum_minor, window: {minutes: 60}, stop: 1000}
  - {name: sure, of: calibration, window: {last: 10}, warn: 0.2}
"""


def test_every_monitor_is_shown_with_its_value_now_its_warning_and_its_stop(sds: Shell) -> None:
    with closing(open_record(sds.home / "claims")) as store:
        watched = contract(("1.0.0", "1.2.0"), more=MONITORS)
        registry.register(store, watched, by="operator", now_ms=now_ms())
        with store.transaction():
            decision_monitors(watched).count(store, MonitoredDecision(paid_minor=250), now_ms(), lambda _: ())
    lines = sds.ok("agents", "show", AGENT, *HERE).partition("monitors\n")[2].partition("contracts\n")[0].splitlines()
    assert [
        "  often: approval_rate not judged yet in the last 10 decisions (warn 0.5, stop 0.9; decisions in it: 1)",
        "  spent: paid_sum_minor 250 in the last 60 minutes (stop 1000; decisions in it: 1)",
        "  sure: calibration not judged yet in the last 10 decisions (warn 0.2; decisions in it: 0)",
    ] == lines
    with closing(open_record(sds.home / "claims")) as store, store.transaction():
        windows.clear(store, AGENT, "decisions")  # which no decision had counted


def test_json_says_the_same(sds: Shell) -> None:
    shown = json.loads(sds.ok("agents", "show", AGENT, "--json", *HERE))
    assert ("ACTIVE", "1.1.0", ["superseded", "in force"]) == (
        shown["agent"]["status"],
        shown["version"],
        [held["standing"] for held in shown["contracts"]],
    )
    moved = json.loads(sds.ok("agents", "suspend", AGENT, "--reason", "r", "--json", *HERE))
    assert {"agent_id": AGENT, "status": "SUSPENDED"} == moved


def test_a_halt_is_seen_wherever_its_agent_is(sds: Shell) -> None:
    sds.ok("halt", "--reason", "wrong table", *HERE)
    assert sds.ok("agents", "list", *HERE).endswith("  (halted by an operator)\n")
    shown = sds.ok("agents", "show", AGENT, *HERE)
    assert ": wrong table" in next(line for line in shown.splitlines() if line.startswith("halted: since 20"))
    sds.ok("resume", "--reason", "right again", *HERE)
    assert (
        "halted" not in sds.ok("agents", "list", *HERE) + sds.ok("agents", "show", AGENT, *HERE).partition("history")[0]
    )


def test_an_executor_that_does_not_answer_is_seen_by_agents_show_and_doctor(sds: Shell) -> None:
    with closing(open_record(sds.home / "claims")) as store:
        for _ in range(breaker.FAILURES_MAX):
            with store.transaction():
                breaker.unanswered(store, "claims", now_ms())
    shown = sds.ok("agents", "show", AGENT, *HERE)
    assert "executor: has not answered 3 orders in a row: events wait since 20" in shown
    assert {"failures": 3} == {"failures": sds.json("agents", "show", AGENT, "--json", *HERE)["breaker"]["failures"]}
    assert "; the executor of claims has not answered 3 orders in a row: events wait since 20" in sds("doctor").stdout


def test_retiring_is_for_good(sds: Shell) -> None:
    assert f"{AGENT} at claims: RETIRED\n" == sds.ok("agents", "retire", AGENT, "--reason", "the desk is closed", *HERE)
    refused = sds("agents", "reactivate", AGENT, "--reason", "no", *HERE)
    assert 2 == refused.returncode
    assert f"error: operator may not move agent `{AGENT}` from RETIRED to ACTIVE" in refused.stderr
    assert "RETIRED" == status(sds)


def test_a_contract_is_revoked_by_its_version(sds: Shell) -> None:
    revoke = ("agents", "revoke", AGENT, "1.0.0", "--reason", "wrong table", *HERE)
    assert [f"{AGENT} 1.0.0: revoked\n", f"{AGENT} 1.0.0: was already revoked\n"] == [sds.ok(*revoke) for _ in range(2)]
    shown = sds.ok("agents", "show", AGENT, *HERE)
    assert ": wrong table" in next(line for line in shown.splitlines() if "  revoked  registered " in line)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("show", "ghost"), "error: there is no agent `ghost`"),
        (("retire", AGENT, "--reason", " "), "error: a reason is needed"),
        (("suspend", AGENT, "--reason", "\u3164"), "error: a reason is needed"),
        (
            ("revoke", AGENT, "9.9.9", "--reason", "r"),
            f"error: agent `{AGENT}` never had a contract of version `9.9.9`",
        ),
        (("revoke", AGENT, "1.0.0", "--reason", ""), "error: the value after `--reason` is empty"),
        (("revoke", AGENT, "1.0.0", "--reason="), "error: the value after `--reason` is empty"),
        (("revoke", "ghost", "1.0.0", "--reason", "r"), "error: there is no agent `ghost`"),
    ],
)
def test_a_mistake_is_answered_in_one_line_and_changes_nothing(sds: Shell, args: tuple[str, ...], said: str) -> None:
    refused = sds("agents", *args, *HERE)
    assert (2, said) == (refused.returncode, refused.stderr.splitlines()[0])
    assert "ACTIVE" == status(sds)

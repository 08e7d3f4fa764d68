"""A saga, as a user meets it: the real model, a rail that declines the second step, and a process that was stopped."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.gate import Gate
from sds.gates.refund.gate import airline_path, ensure_world, load_refund_contract, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.source import TicketSource
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket, Decoding
from tests.cli.conftest import Shell
from tests.gates.refund.test_saga_gate import SAGA, STEPS
from tests.proposers import Greedy

AN_HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def half_settled(shell: Shell) -> Any:
    return shell.json("run", "refund", "--saga", SAGA, "--limit", "2", "--chaos", "fail-second", "--json")


def test_a_second_step_that_fails_is_answered_from_the_menu_and_no_promise_is_broken(half_settled: Any) -> None:
    assert 2 == half_settled["decisions"] == sum(half_settled["outcomes"].values())
    assert 0 < half_settled["dirty"] == sum(half_settled["compensations"].values())
    assert set(half_settled["compensations"]) <= {"REVERT", "CLOSE_ALL", "ALERT_HUMAN"}
    assert [0, 0, 0] == [half_settled[n] for n in ("out_of_envelope", "double_payouts", "compensated_but_paid")]
    assert [] == half_settled["record_faults"]


def test_the_audit_of_a_parent_shows_its_children_and_flows_name_the_saga(shell: Shell, half_settled: Any) -> None:
    dfid = half_settled["dfids"][0]
    record = shell.json("audit", dfid, "--json")
    assert (SAGA, "ENDED") == (record["saga"]["name"], record["saga"]["phase"])
    shown = shell.ok("audit", dfid)
    for child in record["children"]:
        assert f"child {child['dfid']}" in shown
    assert "SAGA" in shown
    flow = record["decision_flows"]
    assert f"{dfid}  {flow['event_id']}  {flow['state']}  {SAGA}  {flow['tag']}" in shell.ok("flows", "--limit", "20")
    assert "0 faults" in shell.ok("ledger", "verify")


def test_chaos_and_sagas_that_do_not_go_together_are_refused_in_plain_words(shell: Shell) -> None:
    for args in (["--chaos", "fail-second"], ["--saga", SAGA, "--chaos", "drift"]):
        done = shell("run", "refund", "--limit", "1", *args)
        assert (2, True) == (done.returncode, "cannot be used with" in done.stderr)
    done = shell("run", "refund", "--limit", "1", "--saga", "NONE")
    assert (2, True) == (done.returncode, "there is no saga `NONE`" in done.stderr)


class Stops(Greedy):
    """A proposer whose process is stopped in the second step."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if packet.event_id.endswith("/2"):
            raise KeyboardInterrupt
        return super().propose(packet, tokens_max=tokens_max)


def stop_half_way(folder: Path) -> None:
    """Leave a saga with its first step paid, an hour ago."""
    ensure_world(folder)
    with closing(TicketSource(airline_path(folder))) as source, RailProcess(folder / "rail.db") as rail:
        gate = Gate(
            load_refund_contract(),
            source,
            rail.executor(source.version),
            folder=folder,
            engine=Stops("REVERT", *STEPS),
            now_ms=lambda: now_ms() - AN_HOUR_MS,
        )
        with gate:
            claims = (c.event for c in reversed(read_queue(folder)))
            claim = next(c for c in claims if "REFUND_TICKET" in gate.preview(c).envelope.names)
            with pytest.raises(KeyboardInterrupt):
                gate.decide_saga(SAGA, claim)


def test_recover_has_the_model_choose_what_is_done_about_a_saga_that_was_stopped_half_way(shell: Shell) -> None:
    stop_half_way(shell.home / "refund")
    found = shell.json("recover", "--json")
    assert (1, 0) == (found["sagas_ended"], found["sagas_dirty"])
    assert "0 faults" in shell.ok("ledger", "verify")
    assert (0, 0) == tuple(shell.json("recover", "--json")[n] for n in ("sagas_ended", "sagas_dirty"))

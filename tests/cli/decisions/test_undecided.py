"""What nobody has decided, on the command line: listed, and decided anew by the real model."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.gates.opening import recovery_kernel
from sds.gates.refund.gate import gate
from sds.host.paths import is_of_older_version, open_record
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.flow.intake import read_event
from sds.kernel.storage.store import UPGRADABLE
from tests.cli.conftest import Shell


@pytest.fixture
def waiting(shell: Shell, report: Any) -> str:
    """Return the flow of the queue's next claim, which got no turn."""
    event = json.loads(shell.ok("events", "refund", "--limit", "1"))
    with recovery_kernel(gate, shell.home / "refund") as kernel:
        packet = kernel.open(read_event(kernel.contract, event))
        assert isinstance(packet, DecisionPacket)
        return kernel.not_decided(packet, "QUEUE_FULL", "256 decisions wait already").dfid


def test_what_waits_is_listed_and_decided_anew(shell: Shell, waiting: str) -> None:
    (listed,) = [line for line in shell.ok("flows", "--undecided").splitlines() if f"  {waiting}  " in line]
    assert listed.endswith("  ABORTED  -  NOT_DECIDED  retryable")
    (told,) = [flow for flow in shell.json("flows", "--undecided", "--json") if flow["dfid"] == waiting]
    assert (True, "QUEUE_FULL") == (told["retryable"], told["reason_code"])
    assert [] == [case for case in shell.json("escalations", "list", "--json") if case["dfid"] == waiting]
    answer = shell.json("retry", waiting[:13])
    assert (waiting, False) == (answer["parent_dfid"], answer["retryable"])
    assert answer["state"] in {"CLOSED", "ESCALATED"}
    assert waiting not in shell.ok("flows", "--undecided")
    assert "CLOSED" in {row["state"] for row in shell.json("flows", "--state", "CLOSED", "--json")}
    refused = shell("retry", waiting)
    assert (2, f"error: flow `{waiting}` was replaced by `{answer['dfid']}`") == (
        refused.returncode,
        refused.stderr.splitlines()[0],
    )


def test_several_are_decided_anew_with_a_line_each_and_one_that_cannot_be_stops_no_other(
    shell: Shell, waiting: str, tmp_path: Path
) -> None:
    file = tmp_path / "flows"
    file.write_text(f"no-such-flow\n{waiting}\n")
    done = shell("retry", "--file", str(file))
    refused, answer = (json.loads(line) for line in done.stdout.splitlines())
    assert (1, "error: 1 of 2 were not done") == (done.returncode, done.stderr.splitlines()[0])
    assert ("no-such-flow", "there is no flow `no-such-flow` in the record") == (refused["id"], refused["error"])
    assert (waiting, False) == (answer["parent_dfid"], answer["retryable"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("retry", "no-such-flow"), "error: there is no flow `no-such-flow` in the record"),
        (("retry", ""), "error: the value after `retry` is empty"),
        (("flows", "--state", "OPEN"), "error: there is no state `OPEN`"),
    ],
)
def test_a_mistake_is_answered_in_one_line(shell: Shell, report: Any, args: tuple[str, ...], said: str) -> None:
    refused = shell(*args)
    assert (2, said) == (refused.returncode, refused.stderr.splitlines()[0])
    assert refused.stderr.splitlines()[1].startswith("mend: ")


def test_a_deadline_that_is_longer_than_the_contract_gives_is_refused_and_nothing_is_recorded(
    shell: Shell, report: Any, tmp_path: Path
) -> None:
    event = tmp_path / "event.json"
    event.write_text(shell.ok("events", "refund", "--limit", "1"))
    before = shell.json("flows", "--json")
    refused = shell("decide", "refund", "--event", str(event), "--deadline-ms", "999999999")
    assert (2, "error: `999999999` is not a valid deadline") == (refused.returncode, refused.stderr.splitlines()[0])
    assert "give a whole number from 1 to 30000, the contract's `budget.ttl_ms`" in refused.stderr
    assert before == shell.json("flows", "--json")


def test_a_model_that_is_refused_leaves_an_older_versions_record_as_it_is(
    shell: Shell, waiting: str, tmp_path: Path
) -> None:
    event, model = tmp_path / "event.json", tmp_path / "model.gguf"
    event.write_text(shell.ok("events", "refund", "--limit", "1"))
    model.write_bytes(b"GGUF, but no model")
    with closing(open_record(shell.home / "refund")) as store, store.transaction():
        store.run("UPDATE meta SET value = ? WHERE key = 'schema_version'", (UPGRADABLE[-1],))
    for command in (("retry", waiting), ("decide", "refund", "--event", str(event))):
        assert shell(*command, "--model", str(model)).returncode
        assert is_of_older_version(shell.home / "refund")
    assert (waiting, False) == (
        shell.json("retry", waiting[:13])["parent_dfid"],
        is_of_older_version(shell.home / "refund"),
    )

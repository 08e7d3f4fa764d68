"""`sds escalations` on the real refund gate: what a human sees, types and gets, with the real tickets and the real rail.

The cases are made by a small engine that says what a test wants: which words a model chooses is not what is tested.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.cli.common import operator
from sds.gate import Gate
from sds.gates.refund import gate as desk
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.world.airline import move_ticket
from sds.host.clock import now_ms
from sds.host.paths import decisions_path
from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import UsageError
from sds.kernel.flow.states import Answer
from sds.kernel.storage.sqlite import SqliteStore
from tests.cli.conftest import Cli, Shell
from tests.gates.refund.opened import open_refund
from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.scale import seeded
from tests.stores.records import alone

CLAIMS = 40


def says(action: str = "ESCALATE", reason: str = "HUMAN_REVIEW", **params: str) -> Says:
    """Return an engine that proposes this, as likely at three to one."""
    alternatives = ({"choice": "action", "chosen": action, "z": 1.0, "probabilities": {"DENY": 0.25, action: 0.75}},)
    return Says(proposal(action, reason, **params), Decoding("says", 0.75, alternatives))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("desk") / "refund"
    desk.ensure_world(made, claims=CLAIMS)
    return made


@pytest.fixture
def cli(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    home = tmp_path / "home"
    (home / "refund").mkdir(parents=True)
    for file in template.iterdir():
        (home / "refund" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("SDS_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(capsys, monkeypatch, home / "refund")


def refund_gate(cli: Cli, engine: Says, with_rail: Callable[[RailProcess], object] = lambda _: None) -> Gate:
    return open_refund(cli.folder, engine=engine, with_rail=with_rail)


def payable(gate: Gate, kind: str) -> dict[str, str]:
    """Return the first claim that nobody has decided and for which `kind` is possible."""
    for claim in desk.read_queue(gate.store.path.parent):
        known = gate.store.value("SELECT 1 FROM events WHERE event_id = ?", (claim.event["claim_id"],))
        if known is None and gate.preview(claim.event).envelope.kind(kind) is not None:
            return claim.event
    raise AssertionError(f"no claim for {kind}")


def always(*kinds: str) -> Contract:
    contract = desk.load_refund_contract()
    escalation = contract.escalation.model_copy(update={"always": kinds})
    return contract.model_copy(update={"escalation": escalation})


def escalated(cli: Cli, kind: str, engine: Says | None = None) -> Answer:
    with refund_gate(cli, engine or says()) as gate:
        answer = gate.decide(payable(gate, kind))
    assert "ESCALATED" == answer.state
    return answer


def paid(cli: Cli) -> list[tuple[str, str, int]]:
    with RailProcess(cli.folder / "rail.db") as rail:
        lines = rail.executor().statement(0, now_ms())
        return [(line.dfid, line.kind, line.amount_minor or 0) for line in lines if line.outcome != "rejected"]


def whole(cli: Cli) -> None:
    with closing(SqliteStore(decisions_path(cli.folder))) as store:
        assert () == verify.verify(store).faults


def test_a_case_is_listed_shown_and_resolved_by_the_command_that_show_prints(cli: Cli) -> None:
    case = escalated(cli, "REFUND_TICKET")
    (line,) = cli.ok("escalations", "list").splitlines()
    assert line.split()[1:] == [case.dfid, case.event_id, "ESCALATED_BY_AGENT", "-", "-"]
    shown = cli.ok("escalations", "show", case.dfid[:13])
    for part in ("ESCALATED_BY_AGENT", "ticket.refundable_minor: ", "now: ", "action: ESCALATE 0.750, DENY 0.250"):
        assert part in shown
    command = next(line.strip() for line in shown.splitlines() if '--modify \'{"action":"REFUND_TICKET"' in line)
    assert command.endswith("--acknowledge")
    told = cli.ok(*shlex.split(command.replace('"..."', '"the flight never left"'))[1:])
    assert told.startswith(f"{case.dfid}  CLOSED  MODIFY  REFUND_TICKET amount 0.01  SUCCESS ")
    assert [(case.dfid, "REFUND_TICKET", 1)] == paid(cli)
    assert "no cases wait for a human\n" == cli.ok("escalations", "list")
    audited = cli.ok("audit", case.dfid)
    for part in ("human\n", "  decision: MODIFY", f"  who: {operator()}", "  reason: the flight never left"):
        assert part in audited
    assert "type one of these commands" not in cli.ok("escalations", "show", case.dfid)
    whole(cli)


def test_a_case_that_cannot_be_read_is_named_and_hides_no_other(cli: Cli) -> None:
    damaged, case = escalated(cli, "REFUND_TICKET"), escalated(cli, "REFUND_TICKET")
    with closing(SqliteStore(decisions_path(cli.folder))) as store:
        alone(store, "UPDATE context_snapshots SET body = 'x' WHERE dfid = ?", (damaged.dfid,))
    code, out, err = cli("escalations", "list")
    first, second = (line.split()[1:] for line in out.splitlines())
    assert (0, [damaged.dfid, damaged.event_id, "RECORD_DAMAGED", "-", "-"], case.dfid) == (code, first, second[0])
    assert "damaged cases are shown incompletely: run sds ledger verify --gate refund\n" == err
    told = cli.json("escalations", "list")
    assert [(damaged.dfid, "RECORD_DAMAGED"), (case.dfid, "ESCALATED_BY_AGENT")] == [
        (each["dfid"], each["reason"]) for each in told
    ]
    code, out, err = cli("escalations", "show", damaged.dfid)
    assert (1, "") == (code, out)
    assert f"the record of flow `{damaged.dfid}` cannot be read" in err
    assert "sds ledger verify" in err
    assert "Traceback" not in err
    code, out, _ = cli("ledger", "verify")
    assert 1 == code
    assert f"table context_snapshots of flow {damaged.dfid} differs from its seal" in out


def test_an_override_pays_what_was_proposed_after_an_acknowledgement_and_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = always("REFUND_TICKET")
    monkeypatch.setattr(desk, "gate", replace(desk.gate, contract=terms))
    case = escalated(cli, "REFUND_TICKET", says("REFUND_TICKET", "NOT_TRAVELLED", amount="12.00"))
    (facts,) = cli.json("escalations", "list")
    assert ("REFUND_TICKET amount 12.00", "HIGH", "APPROVAL_REQUIRED") == (
        facts["proposed"],
        facts["impact"],
        facts["reason"],
    )
    words = ("escalations", "resolve", case.dfid, "--override", "--reason", "checked")
    code, _, err = cli(*words)
    assert (2, True) == (code, "error: this is of HIGH impact: `REFUND_TICKET amount 12.00` will be carried out" in err)
    assert "--acknowledge" in err
    answer = cli.json(*words, "--acknowledge")
    assert ("SUCCESS", "OVERRIDE", operator()) == (answer["execution"], answer["resolution"], answer["resolved_by"])
    code, _, err = cli(*words, "--acknowledge")
    assert (2, True) == (code, f"is resolved already: OVERRIDE by {operator()}" in err)
    assert [(case.dfid, "REFUND_TICKET", 1_200)] == paid(cli)
    with refund_gate(cli, says()) as gate:
        event = next(c.event for c in desk.read_queue(cli.folder) if c.event["claim_id"] == case.event_id)
        again = gate.decide(event)
        assert (case.dfid, "CLOSED", "OVERRIDE") == (again.dfid, again.state, again.resolution)
    whole(cli)


def test_a_ticket_that_moved_is_refused_until_the_human_has_seen_it(cli: Cli) -> None:
    case = escalated(cli, "REFUND_TICKET")
    key = cli.json("escalations", "show", case.dfid)["event"]["ticket_id"]
    assert move_ticket(desk.airline_path(cli.folder), key, seeded(5))
    denial = '{"action":"DENY","reason":"NOT_ELIGIBLE"}'
    words = ("escalations", "resolve", case.dfid, "--modify", denial, "--reason", "not his ticket")
    code, _, err = cli(*words)
    assert (1, True) == (code, "error: the state has moved: " in err)
    facts = cli.json("escalations", "show", case.dfid)
    assert facts["moved"]
    assert all(f"--seen {facts['now']['id']}" in command for command in facts["commands"] if "--modify" in command)
    assert "(moved)" in cli.ok("escalations", "show", case.dfid)
    assert cli.ok(*words, "--seen", facts["now"]["id"]).startswith(f"{case.dfid}  CLOSED  MODIFY  DENY")
    assert [] == paid(cli)


def test_an_order_whose_end_nobody_knows_is_listed_and_settled_by_a_humans_word(cli: Cli) -> None:
    rails: list[RailProcess] = []
    with refund_gate(cli, says("REFUND_TICKET", "NOT_TRAVELLED", amount="3.00"), rails.append) as gate:
        event = payable(gate, "REFUND_TICKET")
        assert gate.kernel.whole.doubt() is None  # as before any order that is not the first
        rails[0].kill()
        answer = gate.decide(event)
        assert "UNKNOWN" == answer.execution
        assert [answer.dfid] == [case.dfid for case in gate.escalations()]
        assert cli.ok("escalations", "list").split()[3:] == ["UNKNOWN", "REFUND_TICKET", "amount", "3.00", "HIGH"]
        assert "--settled REFERENCE" in cli.ok("escalations", "show", answer.dfid)
        with pytest.raises(UsageError, match="of HIGH impact"):
            gate.resolve(answer.dfid, "SETTLED", who="ada", reason="the bank says so", reference="B-7")
        settled = gate.resolve(
            answer.dfid, "SETTLED", who="ada", reason="the bank says so", reference="B-7", acknowledge=True
        )
        assert ("SUCCESS", "B-7") == (settled.execution, settled.reference)
    audited = cli.ok("audit", answer.dfid)
    said = "alternatives of action (1 of the unmasked probability)\n  REFUND_TICKET: REFUND_TICKET 0.750, DENY 0.250"
    assert said in audited
    assert re.search(r" UNKNOWN [0-9a-f]{64}  the payment rail does not answer", audited), "what the executor said"
    assert "settled by a human's word\n  reason: the bank says so\n  who: ada" in audited
    whole(cli)


def test_an_order_that_cannot_be_recovered_is_counted_and_named(cli: Cli) -> None:
    rails: list[RailProcess] = []
    with refund_gate(cli, says("REFUND_TICKET", "NOT_TRAVELLED", amount="3.00"), rails.append) as gate:
        event = payable(gate, "REFUND_TICKET")
        assert gate.kernel.whole.doubt() is None  # as before any order that is not the first
        rails[0].kill()
        dfid = gate.decide(event).dfid
        with gate.store.transaction():
            gate.store.run("DELETE FROM resources")
    code, out, err = cli("recover")
    assert (1, True) == (code, "unknown: 0" in out and "errors: 1" in out)
    assert err.startswith(f"error: 1 flow could not be recovered: {dfid}: StoreError: resource ")
    assert '"event": "recovery.failed"' in (cli.folder / "log.jsonl").read_text(encoding="utf-8")


def test_an_order_of_a_lost_key_is_shown_without_its_texts_and_ended_by_a_human(cli: Cli) -> None:
    rails: list[RailProcess] = []
    with refund_gate(cli, says("REFUND_TICKET", "NOT_TRAVELLED", amount="3.00"), rails.append) as gate:
        event = payable(gate, "REFUND_TICKET")
        assert gate.kernel.whole.doubt() is None  # as above
        rails[0].kill()
        dfid = gate.decide(event).dfid
    (cli.folder / "kernel.key").unlink()
    cli.ok("keys", "rotate", "--lost", "--reason", "the disk died")
    assert "unknown: 1" in cli.ok("recover")
    assert f"{dfid}  {event['claim_id']}  UNKNOWN  REFUND_TICKET amount 3.00" in cli.ok("escalations", "list")
    assert "claim_text: [sealed]" in cli.ok("audit", dfid)
    told = cli.ok("escalations", "resolve", dfid, "--rejected", "--reason", "the bank has nothing", "--acknowledge")
    assert f"{dfid}  ABORTED  REJECTED" in told
    whole(cli)


def test_a_decision_that_there_is_none_of_is_refused_and_never_taken_for_one_that_pays(cli: Cli) -> None:
    with refund_gate(cli, says()) as gate:
        dfid = gate.decide(payable(gate, "REFUND_TICKET")).dfid
        with pytest.raises(UsageError, match="there is no decision `abort`"):
            gate.resolve(dfid, "abort", who="ada", reason="withdrawn", acknowledge=True)  # type: ignore[arg-type]

        assert [dfid] == [case.dfid for case in gate.escalations()]


def test_a_gate_of_ones_own_is_resolved_in_code(cli: Cli) -> None:
    with refund_gate(cli, says()) as gate:
        dfid = gate.decide(payable(gate, "REFUND_TICKET")).dfid
        look = gate.look(dfid)
        change = '{"action":"REFUND_TICKET","params":{"amount":2.00},"reason":"NOT_TRAVELLED"}'
        answer = gate.resolve(dfid, "MODIFY", who="ada", reason="why", change=change, seen=look.seen, acknowledge=True)
        assert ("SUCCESS", "ada", []) == (answer.execution, answer.resolved_by, gate.escalations())
        logged = (cli.folder / "log.jsonl").read_text(encoding="utf-8")
    assert '"event": "flow.resolved"' in logged


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "give exactly one of --override, --modify, --return, --abort, --settled, --rejected"),
        (("--abort", "--override"), 2, "give exactly one of"),
        (("--override",), 2, "the agent proposed nothing that could be carried out"),
        (("--modify", "pay"), 2, "the decision is not JSON"),
        (("--modify", '{"action":"PAY","reason":"NOW"}'), 2, "`PAY` is not permitted now"),
        (("--rejected",), 2, "has no order whose outcome is unknown"),
    ],
)
def test_a_mistake_is_answered_in_one_line_and_changes_nothing(
    cli: Cli, words: tuple[str, ...], code: int, message: str
) -> None:
    case = escalated(cli, "REFUND_TICKET")
    found, _, err = cli("escalations", "resolve", case.dfid, *words, "--reason", "r")
    assert (code, True) == (found, message in err), err
    assert 1 == len(cli.json("escalations", "list"))


def test_without_a_reason_a_record_or_a_flow_nothing_is_resolved(cli: Cli, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "elsewhere")
    assert "there is no record at" in shell("escalations", "list").stderr
    case = escalated(cli, "REFUND_TICKET")
    assert "a reason is needed" in cli("escalations", "resolve", case.dfid, "--abort", "--reason", " ")[2]
    assert "there is no flow `nobody`" in cli("escalations", "show", "nobody")[2]
    done = Shell(cli.folder.parent)("escalations", "resolve", case.dfid, "--abort")
    assert (2, True) == (done.returncode, "Missing option '--reason'" in done.stderr)


def test_a_reason_that_the_record_would_cut_is_refused_with_its_limit(cli: Cli) -> None:
    case, long = escalated(cli, "REFUND_TICKET"), "w" * 501
    for words in (("escalations", "resolve", case.dfid, "--abort"), ("halt",), ("agents", "suspend", "refund-agent")):
        code, _, err = cli(*words, "--reason", long)
        assert (2, True) == (code, "the reason has 501 characters, and the record keeps 500" in err)
        assert "shorten it" in err
    assert 1 == len(cli.json("escalations", "list"))


def test_from_an_altered_ledger_nothing_is_sent_and_a_case_can_be_ended(cli: Cli) -> None:
    case = escalated(cli, "REFUND_TICKET")
    (bound,) = (each for each in cli.json("escalations", "show", case.dfid)["commands"] if "REFUND_TICKET" in each)
    with closing(sqlite3.connect(decisions_path(cli.folder))) as db:
        db.executescript(
            "DROP TRIGGER ledger_no_update; UPDATE ledger SET entry_hash = '00000000' || substr(entry_hash, 9)"
            " WHERE idx = (SELECT max(idx) FROM checkpoints)"
        )
    for words in (shlex.split(bound)[1:], ["recover"]):
        code, _, err = cli(*words)
        assert (1, True) == (code, "the ledger differs from what was signed" in err)
    assert [] == paid(cli)
    assert "nothing is carried out" in cli.ok("escalations", "resolve", case.dfid, "--abort", "--reason", "altered")
    assert "halted" in cli.ok("halt", "--reason", "altered")


def test_a_hint_names_the_case_that_was_typed(cli: Cli) -> None:
    case = escalated(cli, "REFUND_TICKET")
    for words in ((), ("--abort", "--return"), ("--abort", "--seen", "nonsense")):
        err = cli("escalations", "resolve", case.dfid, *words, "--reason", "r")[2]
        assert f"sds escalations show {case.dfid}" in err

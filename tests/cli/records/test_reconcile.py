"""`sds reconcile` on the real refund gate: what differs, the cases that are made of it, and a record put back."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.cli.common import operator
from sds.gate import Gate
from sds.gates.refund import gate as desk
from sds.gates.refund.gate import read_queue
from sds.gates.refund.rail.store import Order, PayoutStore
from sds.host.clock import now_ms
from sds.host.paths import decisions_path
from sds.kernel.audit import verify
from sds.kernel.flow.states import Answer
from sds.kernel.storage.sqlite import SqliteStore
from tests.cli.conftest import Cli
from tests.cli.decisions.test_escalations import CLAIMS
from tests.gates.refund.rail.orders import key_of
from tests.gates.refund.rail.payouts import payouts
from tests.proposers import Greedy

HALF = CLAIMS // 2


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a gate's folder with every claim decided; `half` in it is the record after half of them."""
    made = tmp_path_factory.mktemp("statement") / "refund"
    desk.ensure_world(made, claims=CLAIMS)
    claims = read_queue(made)
    decide(made, [claim.event for claim in claims[:HALF]])
    shutil.copyfile(decisions_path(made), made / "half")
    decide(made, [claim.event for claim in claims[HALF:]])
    return made


@pytest.fixture
def cli(
    decided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cli]:
    folder = shutil.copytree(decided, tmp_path / "home" / "refund")
    monkeypatch.setenv("SDS_HOME", str(folder.parent))
    monkeypatch.setenv("COLUMNS", "200")
    yield Cli(capsys, monkeypatch, folder)
    with closing(SqliteStore(decisions_path(folder))) as store:
        assert () == verify.verify(store).faults


def decide(folder: Path, events: list[dict[str, str]]) -> list[Answer]:
    with Gate.load("refund", folder=folder, engine=Greedy()) as gate:
        return [gate.decide(event) for event in events]


def rail(cli: Cli) -> PayoutStore:
    return PayoutStore(cli.folder / "rail.db", now_ms)


def paid(cli: Cli) -> int:
    return int(payouts(cli.folder / "rail.db")["settled"])


def differences(cli: Cli) -> list[str]:
    return [line for line in cli.ok("escalations", "list").splitlines() if "STATEMENT_DIFFERS" in line]


def test_a_record_that_agrees_is_told_so(cli: Cli) -> None:
    told = cli.ok("reconcile", "refund")
    orders = paid(cli)
    assert f"{orders} orders in the record, {orders} in the statement, 0 in flight: 0 differences\n" == told
    assert {"orders": orders, "lines": orders, "in_the_air": 0, "adopted": [], "differences": []} == cli.json(
        "reconcile", "refund"
    )


def test_a_difference_is_told_is_a_case_and_is_closed_by_the_command_that_show_prints(cli: Cli) -> None:
    rail(cli).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))
    for _ in range(2):
        code, out, err = cli("reconcile", "refund")
        assert 1 == code
        assert f"ORDER_UNKNOWN: key {key_of('x')[:12]}: record: no such order; outside: settled 500: VOUCHER" in out
        assert "error: 1 difference between record and statement\nmend:  sds escalations list\n" == err
    (line,) = differences(cli)
    _, dfid, event, *rest = line.split()
    assert (f"statement/{key_of('x')}", ["STATEMENT_DIFFERS", "-", "-"]) == (event, rest)
    shown = cli.ok("escalations", "show", dfid)
    for part in ("the record: no such order", "the outside: settled 500: VOUCHER amount 500 on TKT-x"):
        assert part in shown
    (command,) = [line.strip() for line in shown.splitlines() if line.strip().startswith("sds escalations resolve")]
    told = cli.ok(*shlex.split(command.replace('"..."', '"they took it back"'))[1:])
    assert f"{dfid}  ABORTED  ABORT  nothing is carried out\n" == told
    assert [] == differences(cli)
    assert f"  who: {operator()}" in cli.ok("audit", dfid)
    logged = (cli.folder / "log.jsonl").read_text(encoding="utf-8")
    events = ("reconcile.compared", "statement.differs", "flow.resolved")
    assert [2, 1, 1] == [logged.count(f'"event": "{event}"') for event in events]


def test_after_a_restored_backup_nothing_is_paid_until_the_rest_is_taken_over_and_nothing_twice(cli: Cli) -> None:
    before, claims = paid(cli), [claim.event for claim in read_queue(cli.folder)]
    for end in ("-wal", "-shm"):
        decisions_path(cli.folder).with_name(f"decisions.db{end}").unlink(missing_ok=True)
    (cli.folder / "half").replace(decisions_path(cli.folder))

    adopt = 'mend:  sds reconcile refund --adopt --reason "..."'
    for options in ([], ["--saga", "REFUND_WITH_VOUCHER"]):
        code, out, err = cli("run", "refund", "--limit", "1", *options)
        assert (1, "") == (code, out)
        assert "does not know: the record was restored from a backup" in err
        assert adopt == err.splitlines()[-1]
    assert "" == cli.ok("flows", "--undecided")
    assert [] == differences(cli)
    refused = decide(cli.folder, claims)
    event = cli.folder / "event.json"
    event.write_text(json.dumps(next(c for c, a in zip(claims, refused, strict=True) if a.retryable)), "utf-8")
    assert adopt in cli("decide", "refund", "--event", str(event))[2].splitlines()
    assert {"RECORD_BEHIND"} == {answer.tag for answer in refused if answer.retryable}
    assert before == paid(cli)
    assert "FAIL  outside: the outside has " in cli("doctor", "--model", "README.md")[1]
    code, out, _ = cli("reconcile", "refund")
    assert 1 == code
    lost = out.count("ORDER_UNKNOWN")
    assert 0 < lost < before

    told = cli.ok("reconcile", "refund", "--adopt", "--reason", "restored from a backup").splitlines()
    assert [
        f"adopted: {lost} orders",
        f"{before} orders in the record, {before} in the statement, 0 in flight: 0 differences",
    ] == told
    assert [] == differences(cli)
    assert "ok    outside: the record of refund holds every order" in cli("doctor", "--model", "README.md")[1]
    again = decide(cli.folder, claims)
    assert before == paid(cli)
    assert before == sum(answer.execution == "SUCCESS" for answer in again)
    assert [claim["claim_id"] for claim in claims] == [answer.event_id for answer in again]


def test_a_flow_that_was_taken_over_is_not_called_undecided(cli: Cli) -> None:
    rail(cli).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))
    (taken,) = cli.json("reconcile", "refund", "--adopt", "--reason", "of another program")["adopted"]
    said = cli("replay", taken)[2].splitlines()
    assert f"error: flow `{taken}` was taken over from the outside, not decided here" == said[0]
    assert f"mend:  sds audit {taken}" == said[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--adopt"], "--adopt and --reason go together"),
        (["--reason", "why"], "--adopt and --reason go together"),
        (["--since", "yesterday"], "`yesterday` is not an ISO 8601 time"),
        (["--until", "2026-13-01"], "`2026-13-01` is not an ISO 8601 time"),
        (["--since", "2026-02-01", "--until", "2026-01-31"], "--until `2026-01-31` is before --since `2026-02-01`"),
        (["--adopt", "--reason", " "], "a reason is needed, for the record"),
    ],
)
def test_a_mistake_is_told_in_one_line(cli: Cli, args: list[str], message: str) -> None:
    code, out, err = cli("reconcile", "refund", *args)
    assert (2, "") == (code, out)
    assert f"error: {message}" == err.splitlines()[0]


def test_a_time_without_orders_has_no_differences(cli: Cli) -> None:
    rail(cli).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))
    for period in (["--until", "2013-01-01"], ["--since", "2999-01-01T00:00+01:00"]):
        assert cli.ok("reconcile", "refund", *period).startswith("0 orders in the record, ")

"""Many cases at once on the command line: each is resolved by itself, has a line of its own, and fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sds.cli.common import operator
from sds.definitions.registry import find
from sds.gate import Gate
from sds.kernel.audit.verify import verify
from sds.kernel.errors import StoreError
from sds.kernel.human import review
from sds.kernel.operations import erasure
from tests.cli.conftest import Cli
from tests.gates.own import GATE, written
from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.stores.opened import KINDS, POSTGRESQL
from tests.stores.records import alone
from tests.stores.server import own_database

NUMBER = 5


class Toll:
    """A gate of one's own whose agent has handed over its cases, and the command line in its home."""

    def __init__(self, cli: Cli, path: Path, gate: Gate) -> None:
        self.cli, self.path, self.gate = cli, str(path), gate
        self.dfids = [gate.decide(self.event(number)).dfid for number in range(NUMBER)]

    @staticmethod
    def event(number: int) -> dict[str, str]:
        return {"trip_id": f"T-{number}", "car_id": "CAR-1", "text": f"please, {number}"}

    def sds(self, *words: str) -> tuple[int, list[str], str]:
        code, out, err = self.cli(*words, "--gate", self.path)
        return code, out.splitlines(), err

    def resolve(self, *words: str) -> tuple[int, list[str], str]:
        return self.sds("escalations", "resolve", *words, "--reason", "the model was down")

    def states(self) -> list[str | None]:
        rows = dict(self.gate.store.rows("SELECT dfid, decision FROM human_decisions"))
        return [rows.get(dfid) for dfid in self.dfids]


@pytest.fixture(params=KINDS)
def toll(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Toll]:
    with ExitStack() as opened:
        url = opened.enter_context(own_database()) if request.param == POSTGRESQL else ""
        monkeypatch.setenv("SDS_HOME", str(tmp_path))
        monkeypatch.setenv("SDS_STORE", url)
        monkeypatch.setenv("COLUMNS", "200")
        path = written(tmp_path / "toll_gate", GATE.replace("ORDERS = {}", f"ORDERS = {{}}  # {tmp_path}"))
        engine = Says(proposal("ESCALATE", "HUMAN_REVIEW"))
        gate = opened.enter_context(Gate.load(find(path), engine=engine))
        yield Toll(Cli(capsys, monkeypatch, tmp_path), path, gate)
        assert () == verify(gate.store).faults


def test_cases_of_a_file_are_ended_one_by_one_with_a_line_and_an_entry_each(toll: Toll, tmp_path: Path) -> None:
    file = tmp_path / "cases"
    file.write_text("# what nobody wants\n" + "\n".join([*toll.dfids, "", toll.dfids[0]]) + "\n")
    code, lines, err = toll.resolve("--abort", "--file", str(file))
    assert (0, "") == (code, err)
    wanted = [f"{dfid}  T-{number}  ABORTED  ABORT" for number, dfid in enumerate(toll.dfids)]
    assert wanted == lines
    bodies = [json.loads(body) for (body,) in toll.gate.store.rows("SELECT body FROM ledger WHERE kind = 'HUMAN'")]
    assert [("ABORT", operator(), "the model was down")] * NUMBER == [
        (body["decision"], body["who"], body["reason"]) for body in bodies
    ]


def test_one_that_is_refused_is_reported_and_the_others_are_done(toll: Toll) -> None:
    toll.gate.resolve(toll.dfids[1], "ABORT", who="ada", reason="first")
    store, sql = toll.gate.store, "UPDATE context_snapshots SET body = ? WHERE dfid = ?"
    kept = store.value("SELECT body FROM context_snapshots WHERE dfid = ?", (toll.dfids[2],))
    alone(store, sql, ("x", toll.dfids[2]))
    words = (*toll.dfids, "nobody")
    code, lines, err = toll.resolve("--return", *words)
    assert (1, True) == (code, err.startswith("error: 3 of 6 were not done"))
    assert f"{toll.dfids[1]}  not done: flow `{toll.dfids[1]}` is resolved already: ABORT by ada" == lines[1]
    assert f"{toll.dfids[2]}  not done: the record of flow `{toll.dfids[2]}` cannot be read" == lines[2]
    assert lines[5].startswith("nobody  not done: there is no flow `nobody`")
    assert ["RETURN", "ABORT", None, "RETURN", "RETURN"] == toll.states()
    alone(store, sql, (kept, toll.dfids[2]))


def test_what_was_done_before_is_no_failure_and_is_not_done_twice(toll: Toll) -> None:
    assert 0 == toll.resolve("--abort", *toll.dfids[:2])[0]
    code, lines, _ = toll.resolve("--abort", "--json", *toll.dfids)
    told = [json.loads(line) for line in lines]
    assert (0, [True, True, False, False, False]) == (code, [each["already"] for each in told])
    assert toll.dfids == [each["dfid"] for each in told]
    assert NUMBER == toll.gate.store.value("SELECT count(*) FROM ledger WHERE kind = 'HUMAN'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--override",), "--override is for one case"),
        (("--override", "--acknowledge"), "--override is for one case"),
        (("--modify", "{}"), "--modify is for one case"),
        (("--rejected", "--acknowledge"), "--rejected is for one case"),
        (("--settled", "B-7", "--acknowledge"), "--settled is for one case"),
        (("--abort", "--seen", "0" * 64), "--seen is for one case"),
    ],
)
def test_what_is_carried_out_is_decided_case_by_case(toll: Toll, words: tuple[str, ...], message: str) -> None:
    code, lines, err = toll.resolve(*words, *toll.dfids)
    assert (2, [], f"error: {message}") == (code, lines, err.splitlines()[0])
    assert [None] * NUMBER == toll.states()


def test_where_the_store_itself_fails_the_rest_is_left(toll: Toll, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, asked = review.HumanReview.resolve, list[str]()

    def fails(at: review.HumanReview, dfid: str, wanted: review.Resolution) -> object:
        asked.append(dfid)
        if len(asked) == 3:
            raise StoreError("the store refused: the disk is full")
        return resolve(at, dfid, wanted)

    monkeypatch.setattr(review.HumanReview, "resolve", fails)
    code, lines, err = toll.resolve("--abort", *toll.dfids)
    assert (1, 2, 3) == (code, len(lines), len(asked))
    assert err.startswith("error: the store refused: the disk is full")
    assert ["ABORT", "ABORT", None, None, None] == toll.states()


def test_cases_are_erased_one_by_one_and_listed(toll: Toll, tmp_path: Path) -> None:
    assert 0 == toll.resolve("--abort", *toll.dfids[1:])[0]
    file = tmp_path / "customers"
    file.write_text("\n".join(f"T-{number}" for number in range(NUMBER)))
    words = ("erase", "--file", str(file), "--reason", "they asked for it")
    code, lines, err = toll.sds(*words)
    assert (1, True) == (code, "error: 1 of 5 were not done" in err)
    assert "T-0  not done: the case of event `T-0` has not ended: its flow is ESCALATED" == lines[0]
    assert [f"T-{number}: the texts are erased" for number in range(1, NUMBER)] == lines[1:]
    toll.gate.resolve(toll.dfids[0], "ABORT", who="ada", reason="withdrawn")
    code, lines, _ = toll.sds(*words, "--json")
    told = [json.loads(line) for line in lines]
    assert (0, [False, True, True, True, True]) == (code, [each["already"] for each in told])
    listed = json.loads(toll.sds("erasures", "--json")[1][0])
    assert {f"T-{number}" for number in range(NUMBER)} == {each["event_id"] for each in listed}
    assert {(operator(), "they asked for it")} == {(each["who"], each["reason"]) for each in listed}
    assert NUMBER == len(toll.sds("erasures")[1])
    assert 0 == toll.gate.store.value("SELECT count(*) FROM case_keys")


def test_keys_of_several_cases_are_overwritten_once(toll: Toll, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 == toll.resolve("--abort", *toll.dfids)[0]
    done, overwrite = list[bool](), erasure.overwrite
    monkeypatch.setattr(erasure, "overwrite", lambda store: done.append(overwrite(store)) or done[-1])
    events = [word for number in range(NUMBER) for word in ("--event", f"T-{number}")]
    assert 0 == toll.sds("erase", *events, "--reason", "they asked for it")[0]
    assert 1 == len(done)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "error: no id is given"),
        (b"# nothing\n\n", "error: no id is given"),
        (b"\xff\xfe", "error: `FILE` is not text in UTF-8"),
        (
            b"\n".join(b"%d" % number for number in range(10_001)),
            "error: 10,001 ids are more than the 10,000 of one call",
        ),
        (b"x" * (10_000 * 1_024 + 1), "error: `FILE` is larger than 10,240,000 bytes"),
        (None, "error: `FILE` cannot be read: no such file or directory"),
    ],
)
def test_a_file_that_holds_no_ids_is_refused(toll: Toll, tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "cases"
    if text is not None:
        file.write_bytes(text)
    code, lines, err = toll.resolve("--abort", "--file", str(file))
    assert (2, [], message.replace("FILE", str(file))) == (code, lines, err.splitlines()[0])
    assert [None] * NUMBER == toll.states()

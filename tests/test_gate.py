"""What `Gate` refuses before it opens anything."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sqlite3
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from sds.cli.common import open_store
from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.gates.refund.gate import ensure_world, read_queue
from sds.host.clock import now_ms
from sds.kernel.audit import verify
from sds.kernel.errors import ModelError, StoreError, TransitionError, UsageError
from sds.kernel.registry import registry
from sds.kernel.storage.store import UPGRADABLE
from sds.models.llamacpp.backend import LlamaBackend
from tests.kernel.durable import Rail, Tickets, contract
from tests.proposers import Greedy
from tests.submission.test_fork import in_a_fork

OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Tickets, Rail]:
    return Tickets(), Rail(tmp_path / "rail.db")


def test_what_is_no_contract_source_or_executor_is_refused_in_plain_words(
    parts: tuple[Tickets, Rail], tmp_path: Path
) -> None:
    tickets, rail = parts
    with pytest.raises(UsageError, match="the contract is neither a Contract nor a Path"):
        Gate("gate: x", tickets, rail, folder=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the state source must be an object"):
        Gate(contract(), Tickets, rail, folder=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the executor must be an object"):
        Gate(contract(), tickets, object(), folder=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the engine must be an object with `propose`"):
        Gate(contract(), tickets, rail, folder=tmp_path / "gate", engine="vllm")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`folder` must be a path"):
        Gate(contract(), tickets, rail, folder=None)  # type: ignore[arg-type]
    assert not (tmp_path / "decisions.db").exists()
    assert not (tmp_path / "gate").exists()


def test_a_file_in_place_of_the_folder_is_told_with_the_argument_to_mend(
    parts: tuple[Tickets, Rail], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file` cannot be created: file exists") as refused:
        Gate(contract(), *parts, folder=tmp_path / "file")
    assert "set `folder` to a folder that exists or can be made" == refused.value.hint


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="looks for open files under /proc")
def test_a_closed_gate_leaves_no_file_of_its_folder_open_whoever_asked_it(tmp_path: Path, tiny: LlamaBackend) -> None:
    ensure_world(tmp_path, claims=8)
    events = [entry.event for entry in read_queue(tmp_path)]
    with Gate.load("refund", folder=tmp_path, engine=NativeEngine(tiny, now_ms=now_ms)) as gate:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(gate.decide, events))
        for each in [gate.submit(event) for event in events]:
            each.result()
        assert _open_below(tmp_path)
    assert _open_below(tmp_path) == []


def _open_below(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    found: list[Path] = []
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(link.readlink())
    return [str(path) for path in found if path.is_relative_to(folder)]


def test_what_is_asked_of_a_closed_gate_is_refused_in_plain_words(
    parts: tuple[Tickets, Rail], tmp_path: Path, tiny: LlamaBackend
) -> None:
    gate = Gate(contract(), *parts, folder=tmp_path / "gate", engine=NativeEngine(tiny, now_ms=now_ms))
    gate.close()
    asked: list[Callable[[], object]] = [
        lambda: gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"}),
        gate.recover,
        gate.escalations,
        lambda: gate.request_retire(reason="done"),
    ]
    for ask in asked:
        with pytest.raises(UsageError, match="the gate is closed"):
            ask()


def test_no_threads_and_a_listener_that_cannot_be_called_are_refused(
    parts: tuple[Tickets, Rail], tmp_path: Path, tiny: LlamaBackend
) -> None:
    engine = NativeEngine(tiny, now_ms=now_ms)
    for given in ({"threads": 0}, {"threads": "2"}, {"queue_max": 0}, {"queue_max": 2.5}, {"on_reasoned": 5}):
        with pytest.raises(UsageError, match=rf"`{next(iter(given))}`.* must be"):
            Gate(contract(), *parts, folder=tmp_path / "gate", engine=engine, **given)
    said = "the listener must be a function of `event` and `facts`"
    gate = Gate(contract(), *parts, folder=tmp_path / "gate", engine=engine)
    with gate, pytest.raises(UsageError, match=said):
        gate.listen("print")  # type: ignore[arg-type]


def test_a_gate_is_neither_copied_nor_sent_to_another_process(parts: tuple[Tickets, Rail], tmp_path: Path) -> None:
    with Gate(contract(), *parts, folder=tmp_path / "gate", engine=Greedy()) as gate:
        for send in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match="a gate cannot be copied, or sent to another process") as refused:
                send(gate)
            assert "open a gate there" == refused.value.hint


class _Panic(BaseException):
    """What a library in another language raises when it gives up."""


@pytest.mark.parametrize("error", [ZeroDivisionError(), CancelledError(), _Panic()])
def test_what_a_listener_raises_changes_nothing(
    parts: tuple[Tickets, Rail], tmp_path: Path, error: BaseException
) -> None:
    def fail(_event: str, _facts: Mapping[str, object]) -> None:
        raise error

    events = [{"claim_id": f"C{n}", "ticket_id": "T1", "text": "please"} for n in (1, 2)]
    with Gate(contract(), *parts, folder=tmp_path / "gate", engine=Greedy()) as gate:
        plain = gate.decide(events[0])
        gate.listen(fail)
        assert (plain.state, plain.reasons) == ((answer := gate.decide(events[1])).state, answer.reasons)


def _fails() -> int:
    raise OSError("no\nclock")


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (lambda: True, "returned `True`"),
        (lambda: 1.5e12, "returned `1500000000000.0`"),
        (lambda: "now", "returned `'now'`"),
        (lambda: None, "returned `None`"),
        (lambda: -1, "returned `-1`"),
        (lambda: 10**30, "returned `1000000"),
        (_fails, "failed: no clock"),
    ],
)
def test_a_clock_that_gives_no_time_is_refused_and_nothing_it_gave_is_on_record(
    parts: tuple[Tickets, Rail], tmp_path: Path, clock: Callable[[], Any], message: str
) -> None:
    folder, event = tmp_path / "gate", {"claim_id": "C1", "ticket_id": "T1", "text": "please"}
    with pytest.raises(UsageError, match=f"the clock `now_ms` {message}"):
        Gate(contract(), *parts, folder=folder, engine=Greedy(), now_ms=clock)
    asked: list[Callable[[], Any]] = [now_ms]

    def ask() -> int:
        at_ms: int = asked[0]()
        return at_ms

    with Gate(contract(), *parts, folder=folder, engine=Greedy(), now_ms=ask) as gate:
        asked[0] = clock
        with pytest.raises(UsageError, match=f"the clock `now_ms` {message}"):
            gate.decide(event)
        asked[0] = now_ms
        assert gate.decide(event).dfid
        assert () == verify.verify(gate.store).faults


def test_paths_may_be_texts(parts: tuple[Tickets, Rail], tmp_path: Path, tiny: LlamaBackend) -> None:
    engine = NativeEngine(tiny, now_ms=now_ms)
    Gate(contract(), *parts, folder=str(tmp_path / "gate"), engine=engine).close()  # type: ignore[arg-type]
    assert (tmp_path / "gate" / "decisions.db").exists()


def test_a_gate_takes_nothing_before_its_contract_is_in_force(parts: tuple[Tickets, Rail], tmp_path: Path) -> None:
    parts[0].put("T1")
    event = {"claim_id": "C1", "ticket_id": "T1", "text": "please"}
    with Gate(contract(), *parts, folder=tmp_path / "gate", engine=Greedy(), register=False) as gate:
        for asked in (gate.decide, gate.submit, gate.known, gate.preview):
            with pytest.raises(UsageError, match="the contract of the gate is not in force yet"):
                asked(event)
        assert 0 == gate.store.value("SELECT (SELECT count(*) FROM contracts) + (SELECT count(*) FROM decision_flows)")
        gate.register()
        kernel = gate.kernel
        gate.register()
        assert kernel is gate.kernel, "once"
        assert "CLOSED" == gate.decide(event).state
    for ended in (gate, Gate(contract(), *parts, folder=tmp_path / "other", engine=Greedy(), register=False)):
        ended.close()
        with pytest.raises(UsageError, match="the gate is closed"):
            ended.decide(event)


def test_a_gate_that_is_closed_or_forked_puts_no_contract_in_force(parts: tuple[Tickets, Rail], tmp_path: Path) -> None:
    with Gate(contract(), *parts, folder=tmp_path / "gate", engine=Greedy(), register=False) as gate:

        def ask() -> None:
            with pytest.raises(UsageError, match="the gate was opened by another process"):
                gate.register()

        assert 0 == in_a_fork(ask)
        assert 0 == gate.store.value("SELECT count(*) FROM contracts")
    with pytest.raises(UsageError, match="the gate is closed"):
        gate.register()


def test_an_agent_whose_work_is_done_asks_through_its_gate_to_be_retired(
    parts: tuple[Tickets, Rail], tmp_path: Path, tiny: LlamaBackend
) -> None:
    parts[0].put("T1")
    with Gate(contract(), *parts, folder=tmp_path / "gate", engine=NativeEngine(tiny, now_ms=now_ms)) as gate:
        gate.request_retire(reason="no claims are left")
        assert "RETIRED" == registry.agents(gate.store)[0].status
        assert ("ESCALATE",) == gate.preview({"claim_id": "C1", "ticket_id": "T1", "text": "please"}).envelope.names
        with pytest.raises(TransitionError, match="agent may not move agent `claims-agent` from RETIRED to RETIRED"):
            gate.request_retire(reason="once more")
        (entry,) = gate.store.rows("SELECT body FROM ledger WHERE kind = 'AGENT' AND body LIKE '%RETIRED%'")
        assert ("agent", "no claims are left") == tuple(json.loads(entry[0])[name] for name in ("by", "reason"))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["deleted", "emptied"])
def test_a_folder_whose_record_is_gone_is_refused_and_looking_at_it_does_not_mend_that(
    parts: tuple[Tickets, Rail], tmp_path: Path, tiny: LlamaBackend, damage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(tiny, now_ms=now_ms)
    Gate(contract(), *parts, folder=tmp_path / "gate", engine=engine).close()
    for file in (tmp_path / "gate").glob("decisions.db-*"):
        file.unlink()
    damage(tmp_path / "gate" / "decisions.db")  # type: ignore[operator]
    gone = re.escape("decisions.db` is gone, but its key is there")
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    for _ in range(2):
        with pytest.raises(StoreError, match=gone):
            open_store("gate")
        with pytest.raises(StoreError, match=gone):
            Gate(contract(), *parts, folder=tmp_path / "gate", engine=engine)


class Refuses(Greedy):
    def check_contract(self, _: object) -> None:
        raise ModelError("it cannot decide under this contract")


@pytest.mark.parametrize("deciding", [{"engine": Refuses()}, {"model": "missing.gguf"}], ids=["engine", "model"])
def test_a_version_that_cannot_decide_leaves_an_older_versions_record_as_it_is(
    parts: tuple[Tickets, Rail], tmp_path: Path, deciding: dict[str, Any]
) -> None:
    path = tmp_path / "gate" / "decisions.db"
    Gate(contract(), *parts, folder=path.parent, engine=Greedy()).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (UPGRADABLE[-1],))
    with pytest.raises(ModelError):
        Gate(contract(), *parts, folder=path.parent, **deciding)
    with closing(sqlite3.connect(path)) as db:
        assert [(UPGRADABLE[-1],)] == db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()

"""A gate by path whose orders go to the sandbox gateway, a process of its own that loses replies and forgets keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sds import Gate
from sds.definitions.registry import find
from sds.gates.opening import recovery_kernel
from sds.host.clock import now_ms
from sds.kernel.errors import UsageError
from sds.kernel.executor.wholeness import PAUSE_MS_MIN
from sds.kernel.flow.states import Answer
from tests.engines.servers import free_port
from tests.executors.gateways import asked, in_process, in_thread, written
from tests.gates.own import written as write_gate
from tests.proposers import Greedy

GATE = '''
from pathlib import Path
from sds import GateDefinition, StateRead, load_executor, parse_contract

CONTRACT = parse_contract("""
gate: toll
agent_id: toll-agent
version: 1.0.0
owner: toll@bridge.example
effective_from: "2026-01-01"
mission: Decide whether a toll is given back.
authority: [GIVE_BACK, DENY]
event: {id: trip_id, key: car_id}
snapshot: {car.open_minor: fixed(2)}
kinds:
  GIVE_BACK:
    params:
      amount: {lo: 100, hi: car.open_minor, step: 100, scale: 2}
    draws: {car.open_minor: amount}
    spends: amount
    reasons: [EMERGENCY]
  DENY:
    reasons: [NO_REASON]
draws_settle_in: kernel      # the gateway moves the money, and knows nothing of our state
budget: {dispatch_ms_max: 10000}
retry: {restarts_max: 10}
""")


class Cars:
    def read(self, key):
        return StateRead({"car.open_minor": 500}, version="1")


def opened(folder):
    return Cars(), load_executor(Path(__file__).with_name("gateway.yaml"))


gate = GateDefinition(name="toll", contract=CONTRACT, open=opened)
'''
TRIES_MAX = 30


@contextmanager
def opened(folder: Path, url: str, *edits: tuple[str, str], clock_ms: Callable[[], int] = now_ms) -> Iterator[Gate]:
    path = write_gate(folder / "toll", GATE)
    written(path.parent, url, *edits)
    with Gate.load(path, folder=folder / "home", engine=Greedy("GIVE_BACK"), now_ms=clock_ms) as gate:
        yield gate


def decide(gate: Gate, number: int) -> Answer:
    return gate.decide({"trip_id": f"T-{number}", "car_id": f"CAR-{number}"})


def paid(url: str) -> dict[str, Any]:
    """Return how much was paid to each car, and which keys were paid twice."""
    totals = asked(url, "GET", "/payments")[1]
    cars = dict[str, int]()
    for each in totals["payments"]:
        cars[each["order"]["account"]] = cars.get(each["order"]["account"], 0) + each["total"]
    return {"cars": cars, "twice": totals["paid_twice"]}


def test_with_lost_replies_and_worse_each_event_is_paid_exactly_once(tmp_path: Path) -> None:
    """An event is sent again until it has its answer, and recovery runs in between: that is what a caller does."""
    faults = "lose-replies=0.3,cut-replies=0.1,drop=0.1,fail=0.2,down=0.1,answer-twice=0.2,seed=11"
    with in_process(tmp_path, faults) as url, opened(tmp_path, url) as gate:
        waiting, unknown = set(range(20)), 0
        for _ in range(TRIES_MAX):
            waiting -= {number for number in sorted(waiting) if decide(gate, number).execution == "SUCCESS"}
            found = gate.recover()
            unknown += found.unknown
            assert () == found.errors
            if not waiting:
                break
        assert (set(), True) == (waiting, unknown > 0)
        assert {"cars": {f"CAR-{n}": 500 for n in range(20)}, "twice": []} == paid(url)
        assert () == gate.reconcile().differences


def serving(folder: Path, apart: bool) -> AbstractContextManager[str]:
    return in_process(folder, "lose-replies=1") if apart else served(folder, "lose-replies=1")


@contextmanager
def served(folder: Path, faults: str) -> Iterator[str]:
    with in_thread(folder, faults) as server:
        yield server.url


@pytest.mark.parametrize("declared", [True, False], ids=["it says so", "it does not say so"])
def test_a_gateway_that_has_forgotten_pays_nothing_twice_where_it_says_that_it_forgets(
    tmp_path: Path, declared: bool
) -> None:
    """Each order is paid and its reply lost; then the gateway calls it absent, and would pay it again."""
    kept = [("# keys_kept_ms: 86400000", "keys_kept_ms: 300")] if declared else []
    with serving(tmp_path, declared) as url, opened(tmp_path, url, *kept) as gate:
        answers = [decide(gate, number) for number in range(2)]
        assert ["UNKNOWN"] * 2 == [answer.execution for answer in answers]
        asked(url, "POST", "/faults", {"forget-keys-ms": 300})
        time.sleep(0.4)
        found = gate.recover()
        if not declared:
            assert (2, 2) == (found.success, len(paid(url)["twice"]))  # what the declaration is for
            return
        assert (2, 0, 0) == (found.unknown, found.success, found.failed)
        assert {"cars": {"CAR-0": 500, "CAR-1": 500}, "twice": []} == paid(url)
        assert [answer.dfid for answer in answers] == [case.dfid for case in gate.escalations() if case.unknown]
        assert "UNKNOWN" == decide(gate, 0).execution
        human = {"who": "ada", "reason": "the gateway's account shows it", "acknowledge": True}
        settled = gate.resolve(answers[0].dfid, "SETTLED", reference="pay_00000001", **human)  # type: ignore[arg-type]
        assert ("CLOSED", "SUCCESS") == (settled.state, settled.execution)
        assert {"CAR-0": 500, "CAR-1": 500} == paid(url)["cars"]


def test_while_the_gateway_is_down_events_wait_and_then_are_paid_once(tmp_path: Path) -> None:
    port, later_ms = free_port(), 0
    url = f"http://127.0.0.1:{port}"
    with opened(tmp_path, url, clock_ms=lambda: now_ms() + later_ms) as gate:
        never_seen = decide(gate, 0)
        assert ("EXECUTOR_DOWN", True) == (never_seen.tag, never_seen.retryable)  # what it has paid is not known
        with in_thread(tmp_path, port=port):
            later_ms = PAUSE_MS_MIN  # for so long it is remembered that the statement could not be read
            assert "SUCCESS" == decide(gate, 0).execution
            gate.kernel.dispatcher.executor._executor.close()  # type: ignore[attr-defined]  # its kept connections
        waits = decide(gate, 1)
        assert ("ABORTED", "NOT_SENT", True) == (waits.state, waits.tag, waits.retryable)
        with in_thread(tmp_path, port=port):
            assert "SUCCESS" == decide(gate, 1).execution
            assert {"cars": {"CAR-0": 500, "CAR-1": 500}, "twice": []} == paid(url)


def test_a_gateway_that_carries_out_later_pays_each_event_once_and_lists_it_meanwhile(tmp_path: Path) -> None:
    with in_process(tmp_path, "accept-ms=600000,lose-replies=0.3,seed=5") as url, opened(tmp_path, url) as gate:
        assert {"UNKNOWN"} == {decide(gate, number).execution for number in range(5)}
        for _ in range(3):
            assert 5 == gate.recover().unknown
        assert () == gate.reconcile().differences
        asked(url, "POST", "/faults", {})
        assert 5 == gate.recover().success
        assert {"cars": {f"CAR-{n}": 500 for n in range(5)}, "twice": []} == paid(url)
        assert () == gate.reconcile().differences


@pytest.mark.parametrize("edit", ['amount: "{params.amount:3}"', 'amount: "{params.amount:1n}"'])
def test_a_file_that_writes_other_decimals_than_the_contract_has_is_refused_before_anything_is_opened(
    tmp_path: Path, edit: str
) -> None:
    refused = r"writes `params.amount` with \d decimals, but kind `GIVE_BACK` has 2"
    with (
        pytest.raises(UsageError, match=refused) as caught,
        opened(tmp_path, "http://127.0.0.1:9", ('amount: "{params.amount}"', edit)),
    ):
        pass
    assert "write `{params.amount:2}` in the file" == caught.value.hint
    assert not (tmp_path / "home" / "decisions.db").exists()


@pytest.mark.parametrize("edit", ['amount: "{params.amount:2}"', 'amount: "{params.amount:2n}"'])
def test_a_file_with_the_contracts_decimals_is_opened(tmp_path: Path, edit: str) -> None:
    with opened(tmp_path, "http://127.0.0.1:9", ('    amount: "{params.amount}" ', f"    {edit} ")) as gate:
        assert gate.escalations() == []


HOLD = ("  DENY:\n", "  HOLD:\n    side_effect: true\n    reasons: [EMERGENCY]\n  DENY:\n")
AMOUNT = ('    amount: "{params.amount}" ', "    # ")
SETTLED = "settled: [{status: [201], where: {status: settled}}]"
COMPARED = 'settled: [{status: [201], where: {status: settled, amount: "{params.amount}", currency: "{currency}"}}]'


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([], "order"),
        ([AMOUNT], "order"),
        ([AMOUNT, (COMPARED, SETTLED)], "lookup"),
    ],
)
def test_a_file_that_can_write_no_order_of_a_kind_or_believe_no_answer_to_it_is_refused(
    tmp_path: Path, edits: list[tuple[str, str]], named: str
) -> None:
    """Each case of that kind went to a human, who could not carry it out either."""
    path = write_gate(tmp_path / "toll", GATE.replace(*HOLD).replace("[GIVE_BACK, DENY]", "[GIVE_BACK, HOLD, DENY]"))
    written(path.parent, "http://127.0.0.1:9", *edits)
    refused = f"names `params.amount` in `{named}`, but kind `HOLD`, which is carried out, has none"
    with pytest.raises(UsageError, match=refused):
        Gate.load(path, folder=tmp_path / "home", engine=Greedy("GIVE_BACK"))
    assert not (tmp_path / "home" / "decisions.db").exists()


def test_a_file_whose_one_rule_fits_an_order_without_an_amount_is_opened(tmp_path: Path) -> None:
    path = write_gate(tmp_path / "toll", GATE.replace(*HOLD).replace("[GIVE_BACK, DENY]", "[GIVE_BACK, HOLD, DENY]"))
    lookup = COMPARED.replace("201", "200"), SETTLED.replace("201", "200")
    written(path.parent, "http://127.0.0.1:9", AMOUNT, (COMPARED, SETTLED), lookup)
    with Gate.load(path, folder=tmp_path / "home", engine=Greedy("GIVE_BACK")) as gate:
        assert gate.escalations() == []


def test_such_a_file_carries_out_no_humans_decision_either(tmp_path: Path) -> None:
    """Commands open a kernel without a gate."""
    with opened(tmp_path, "http://127.0.0.1:9"):
        pass
    definition = find(tmp_path / "toll" / "gate.py")
    with recovery_kernel(definition, tmp_path / "home"):
        pass
    written(tmp_path / "toll", "http://127.0.0.1:9", ('amount: "{params.amount}"', 'amount: "{params.amount:3}"'))
    with (
        pytest.raises(UsageError, match="with 3 decimals, but kind `GIVE_BACK` has 2"),
        recovery_kernel(definition, tmp_path / "home"),
    ):
        pass

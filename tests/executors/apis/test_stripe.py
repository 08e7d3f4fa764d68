"""Gates over Stripe, with the file of docs/library.md: every refund once, whatever becomes of the answer."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest

from sds.executors.http import load_executor
from sds.kernel.audit import verify
from sds.kernel.executor.protocol import ExecutionIntent
from tests.executors.apis.serving import Payment, Request, serving
from tests.executors.apis.stripe import SECRET, Stripe
from tests.executors.test_gate_by_http import decide
from tests.executors.test_known_apis import compared, opened, state

KEY = "k" * 64
DEADLINE_S = 5.0


def refund(amount: int) -> ExecutionIntent:
    return ExecutionIntent("flow-1", KEY, "GIVE_BACK", (("amount", amount),), "ch_1", "7")


def test_a_refund_succeeds_once_and_one_of_a_charge_that_has_nothing_left_is_refused(tmp_path: Path) -> None:
    api = Stripe("succeeded")
    with opened(tmp_path, api) as gate:
        paid = decide(gate, 1)
        assert ("CLOSED", "SUCCESS") == (paid.state, paid.execution)
        assert {"key", "flow", "kind"} == api.payments["p-1"].metadata.keys()
        api.refuses = True
        refused = decide(gate, 2)
        assert ("ESCALATED", "EXECUTION_FAILED") == (refused.state, refused.tag)
        assert (1, ()) == (len(api.payments), verify.verify(gate.store).faults)


def test_a_refund_whose_reply_is_lost_is_found_in_the_list_of_its_charge(tmp_path: Path) -> None:
    api = Stripe("succeeded", loses=1)
    with opened(tmp_path, api) as gate:
        assert "SUCCESS" == decide(gate, 1).execution
        assert (1, 1, "CAR-1") == (api.orders, len(api.payments), api.listed[-1]["charge"])


def test_a_refund_that_the_list_does_not_have_yet_is_sent_again_and_the_key_gives_its_kept_result(
    tmp_path: Path,
) -> None:
    api = Stripe("succeeded", loses=1, hides=True)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        assert ("EXECUTING", "UNKNOWN") == state(gate, answer)
        assert (1, 2, 1) == (gate.recover().success, api.orders, len(api.payments))


def test_a_list_that_has_more_pages_does_not_say_that_a_refund_is_absent(tmp_path: Path) -> None:
    class ByHandToo(Stripe):
        def _order(self, request: Request) -> tuple[int, dict[str, object], bool]:
            found = super()._order(request)
            self.payments["p-9"] = Payment(9, "", "CAR-1", 100, "eur", "succeeded")
            return found

    api = ByHandToo("succeeded", charged=10_000, loses=1)
    with opened(tmp_path, api, ("{resource_key}&limit=100", "{resource_key}&limit=1")) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        assert (1, 1) == (gate.recover().unknown, api.orders)


def test_a_refund_that_is_made_and_answered_500_which_the_key_keeps_is_found_by_the_look_up(tmp_path: Path) -> None:
    api = Stripe("succeeded", breaks=True, hides=True)
    with opened(tmp_path, api) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        assert (1, 2) == (gate.recover().unknown, api.orders)
        api.show()
        assert (1, 1) == (gate.recover().success, len(api.payments))


def test_while_the_same_key_is_under_way_the_order_is_unknown_and_then_it_is_sent_again_under_its_key(
    tmp_path: Path,
) -> None:
    api = Stripe("succeeded", busy=True)
    with opened(tmp_path, api) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        assert 1 == gate.recover().unknown
        api.busy = False
        assert 1 == gate.recover().success
        assert 1 == len(api.payments)


def test_a_key_that_was_used_with_other_parameters_is_no_refusal(tmp_path: Path) -> None:
    """A refusal would let the kernel order afresh under another key, and the first refund was made."""
    api = Stripe("succeeded")
    with serving(api) as url:
        (tmp_path / "gateway.yaml").write_text(api.file(url), encoding="utf-8")
        with closing(load_executor(tmp_path / "gateway.yaml")) as executor:
            assert "settled" == executor.dispatch(refund(200), KEY, DEADLINE_S).status
            assert "unknown" == executor.dispatch(refund(100), KEY, DEADLINE_S).status
            assert "settled" == executor.dispatch(refund(200), KEY, DEADLINE_S).status  # the kept result
    assert (3, 1) == (api.orders, len(api.payments))


@pytest.mark.parametrize(
    ("edit", "paid"),
    [(("  body: form                          #", "  #"), 0), (("currency: eur ", "currency: eur "), 1)],
)
def test_stripe_takes_forms_and_no_json(tmp_path: Path, edit: tuple[str, str], paid: int) -> None:
    api = Stripe("succeeded")
    with opened(tmp_path, api, edit) as gate:
        decide(gate, 1)
    assert paid == len(api.payments)


@pytest.mark.parametrize("declared", [True, False], ids=["it says so", "it does not say so"])
def test_keys_that_are_forgotten_while_the_list_lags_refund_nothing_twice_where_the_file_says_when(
    tmp_path: Path, declared: bool
) -> None:
    api = Stripe("succeeded", charged=10_000, loses=1, hides=True)
    kept = "keys_kept_ms: 86400000                #"
    with opened(tmp_path, api, (kept, "keys_kept_ms: 1  #" if declared else "#")) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        api.forget()
        found = gate.recover()
        assert ((1, 0), 1) if declared else ((0, 1), 2) == ((found.unknown, found.success), len(api.payments))


def test_a_statement_is_read_from_its_newest_page_to_its_last_and_refunds_by_hand_are_left_out(tmp_path: Path) -> None:
    api = Stripe("pending")
    with opened(tmp_path, api, ("limit=100&starting_after", "limit=2&starting_after")) as gate:
        for number in range(5):
            decide(gate, number)
        api.end("succeeded")
        assert 5 == gate.recover().success
        api.listed.clear()
        assert (5, 5, 0, ()) == compared(gate)
        assert [None, "p-4", "p-2"] == [asked.get("starting_after") for asked in api.listed]
        api.payments["p-5"].status = "failed"  # its bank sent it back days later
        api.payments["p-4"].amount = 400
        assert {"REJECTED_OUTSIDE", "AMOUNT_DIFFERS"} == set(compared(gate)[3])


def test_the_secret_is_in_no_log_and_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(Stripe):
        def _shown(self, made: object) -> dict[str, object]:
            return {**super()._shown(made), "id": f"re_{SECRET}"}  # type: ignore[arg-type]

    caplog.set_level(logging.DEBUG)
    api = Talkative("succeeded")
    with opened(tmp_path, api) as gate:
        assert "SUCCESS" == decide(gate, 1).execution
        assert "re_***" == gate.store.value("SELECT external_receipt FROM execution_log")
    assert SECRET not in caplog.text
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]

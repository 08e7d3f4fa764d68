"""A human's word about an order whose end nobody knows: the executor is asked first, and it is on the record."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.in_flight import orders_in_flight
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import attest
from tests.kernel.durable import (
    World,
)
from tests.kernel.humans import Silent, unknown


def say(world: World, silent: Silent, dfid: str, receipt: Receipt, *, acknowledged: bool = True) -> Answer:
    kernel = world.open_kernel(executor=silent)
    who = {"who": "ada", "reason": "asked the bank", "acknowledged": acknowledged}
    return attest(kernel, dfid, receipt, now_ms=world.clock(), **who)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("receipt", "state", "execution", "drawn"),
    [(Receipt("settled", "B-7"), "CLOSED", "SUCCESS", 4_000), (Receipt("rejected"), "ABORTED", "FAILED", 0)],
)
def test_a_human_says_what_became_of_an_order_and_that_is_in_the_ledger(
    world: World, receipt: Receipt, state: str, execution: str, drawn: int
):
    silent = Silent()
    dfid = unknown(world, silent)
    answer = say(world, silent, dfid, receipt)
    assert (state, execution, receipt.reference or None) == (answer.state, answer.execution, answer.reference)
    assert [drawn] == world.column("SELECT drawn FROM resources")
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'RESOLVED'")
    assert {"who": "ada", "reason": "asked the bank"} == json.loads(str(body))["by"]
    assert () == verify.verify(world.store).faults
    assert 1 == len(silent.sent)


def test_the_executors_own_definite_answer_wins_over_a_humans_word(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("settled", "its own")
    answer = say(world, silent, dfid, Receipt("rejected"))
    assert ("SUCCESS", "its own") == (answer.execution, answer.reference)
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'RESOLVED'")
    assert "by" not in json.loads(str(body))


def test_what_is_certainly_absent_was_not_carried_out_whatever_a_human_says(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("absent")
    with pytest.raises(UsageError, match="the executor is certain that nothing was done") as caught:
        say(world, silent, dfid, Receipt("settled", "B-7"))
    assert "resolve it as rejected" in caught.value.hint
    assert "FAILED" == say(world, silent, dfid, Receipt("rejected")).execution


def test_a_humans_word_needs_an_acknowledgement_a_reference_and_an_order_that_is_unknown(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    with pytest.raises(UsageError, match="this is of HIGH impact: what the order reserved stays taken for good"):
        say(world, silent, dfid, Receipt("settled", "B-7"), acknowledged=False)
    for reference in ("", " ", "\x00", "B\n7", "\u200b", "\u3164", "\u2800"):
        with pytest.raises(UsageError, match="needs the reference that it has outside, in printable text"):
            say(world, silent, dfid, Receipt("settled", reference))
    say(world, silent, dfid, Receipt("rejected"))
    with pytest.raises(UsageError, match="has no order whose outcome is unknown"):
        say(world, silent, dfid, Receipt("settled", "B-7"))
    assert ["FAILED"] == world.column("SELECT status FROM execution_log")


def test_an_altered_order_is_neither_looked_up_nor_sent_and_a_human_may_still_end_it(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("settled", "another's")
    with world.store.transaction():
        world.store.run("UPDATE execution_log SET idempotency_key = ?", ("f" * 64,))
    assert ("FAILED", None) == (
        (answer := say(world, silent, dfid, Receipt("rejected"))).execution,
        answer.reference,
    )


def test_of_two_humans_with_opposite_words_the_first_is_kept_and_the_order_is_not_dirty(world: World):
    silent = Silent()
    unknown(world, silent)
    kernel = world.open_kernel(executor=silent)
    (intent,) = orders_in_flight(kernel.store, kernel.contract.gate, world.clock())
    words = [Receipt("rejected"), Receipt("settled", "B-7")]
    assert ["FAILED", "FAILED"] == [kernel.dispatcher.attest(intent, word, by={"who": "ada"}) for word in words]
    assert [("FAILED", None)] == world.store.rows("SELECT status, external_receipt FROM execution_log")
    assert () == verify.verify(world.store).faults


class Asked(Silent):
    """A silent rail. `meanwhile`: what somebody else does while it is asked what became of an order."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().lookup(key, deadline_s)


@pytest.mark.parametrize("second", [Receipt("settled", "B-7"), Receipt("rejected")], ids=lambda receipt: receipt.status)
def test_of_two_humans_at_once_the_second_learns_that_their_word_is_not_the_one_on_record(
    world: World, second: Receipt
):
    asked = Asked()
    dfid = unknown(world, asked)
    kernel = world.open_kernel(executor=asked)

    def says(who: str, receipt: Receipt) -> Answer:
        return attest(kernel, dfid, receipt, who=who, reason="asked", acknowledged=True, now_ms=world.clock())

    asked.meanwhile.append(lambda: says("bob", Receipt("rejected")))
    with pytest.raises(UsageError, match="outcome is unknown: bob has said what became of it") as caught:
        says("ada", second)
    assert "FLOW_CLOSED" == caught.value.reason_code
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'RESOLVED'")
    assert ("FAILED", "bob") == (json.loads(str(body))["status"], json.loads(str(body))["by"]["who"])

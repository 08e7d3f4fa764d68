"""The executor's side of the wall: only what the kernel signed leaves it, and no answer is taken on faith."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from sds.kernel.errors import ExecutorError
from sds.kernel.executor.protocol import ExecutionIntent, NoExecutor, Receipt, VerifyingExecutor
from sds.kernel.storage.keyring import Signer, key_name
from tests.kernel.durable import SIGNER, World, compensate, refund
from tests.kernel.faults import WordlessError

INTENT = ExecutionIntent("flow-1", "k" * 64, "REFUND_TICKET", (("amount", 4000),), "T1", "7").signed_by(SIGNER)
UNSIGNED = "the order has another key or no valid signature; nothing was sent"
OTHER = {
    "dfid": "flow-2",
    "idempotency_key": "l" * 64,
    "kind": "COMPENSATE",
    "params": (("amount", 4001),),
    "resource_key": "T2",
    "state_version": "8",
    "signature": "0" * 64,
}


class Hands:
    """Carries out anything it is given, and remembers it."""

    idempotent = True

    def __init__(self) -> None:
        self.carried_out: list[ExecutionIntent] = []

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.carried_out.append(intent)
        return Receipt("settled")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return Receipt("absent")


def test_what_the_kernel_signed_passes():
    hands = Hands()
    assert Receipt("settled") == VerifyingExecutor(hands, SIGNER).dispatch(INTENT, INTENT.idempotency_key, 1.0)
    assert [INTENT] == hands.carried_out


@pytest.mark.parametrize("name", [field.name for field in fields(ExecutionIntent)])
def test_an_intent_with_any_field_changed_does_not_pass(name: str):
    hands = Hands()
    changed = replace(INTENT, **{name: OTHER[name]})
    told = VerifyingExecutor(hands, SIGNER).dispatch(changed, changed.idempotency_key, 1.0)
    assert Receipt("rejected", detail=UNSIGNED) == told
    assert [] == hands.carried_out


def test_an_intent_does_not_pass_under_another_key():
    assert Receipt("rejected", detail=UNSIGNED) == VerifyingExecutor(Hands(), SIGNER).dispatch(INTENT, "l" * 64, 1.0)


def test_an_intent_of_another_kernel_does_not_pass():
    another = VerifyingExecutor(Hands(), Signer(b"another kernel's key, 32 bytes.."))
    assert Receipt("rejected", detail=UNSIGNED) == another.dispatch(INTENT, "k" * 64, 1.0)


@pytest.mark.parametrize("signature", ["", "ÿ" * 64, "\udcff", "0" * 10_000])
def test_a_signature_that_is_none_is_told_not_raised(signature: str):
    assert not replace(INTENT, signature=signature).is_signed_by(SIGNER)


@pytest.mark.parametrize("params", [(("amount", 10**40),), (("amount", object()),), (("\udcff", 1),)])
def test_params_that_cannot_be_signed_are_told_not_raised(params: tuple[tuple[str, int], ...]):
    assert not replace(INTENT, params=params).is_signed_by(SIGNER)


def test_a_short_key_is_refused_and_a_key_is_never_shown():
    with pytest.raises(ExecutorError, match="shorter than 32 bytes"):
        Signer(b"x" * 31)
    assert "Signer(key=***)" == repr(SIGNER)


def test_a_look_ahead_executor_carries_nothing_out():
    assert Receipt("unsent", detail="this kernel has no executor") == NoExecutor().dispatch(INTENT, "k" * 64, 1.0)
    assert "unknown" == NoExecutor().lookup("k" * 64, 1.0).status


class Foreign(Hands):
    """Answers whatever it is told to."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        return self._answer  # type: ignore[return-value]  # foreign code promises nothing

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._answer  # type: ignore[return-value]  # foreign code promises nothing


@pytest.mark.parametrize("answer", [None, "settled", 1, Receipt("paid"), Receipt([])])  # type: ignore[arg-type]
def test_an_answer_that_is_no_receipt_leaves_the_order_unknown(world: World, answer: object):
    world.rail = Foreign(answer)  # type: ignore[assignment]
    world.kernel = world.open_kernel()
    assert "UNKNOWN" == world.decide(refund()).execution


def test_a_reference_that_cannot_be_stored_as_it_came_is_stored_cleaned(world: World):
    world.rail = Foreign(Receipt("settled", "PAY\n\udcff\x1b7" + "x" * 9_999))  # type: ignore[assignment]
    world.kernel = world.open_kernel()
    answer = world.decide(refund())
    assert "SUCCESS" == answer.execution
    assert "PAY 7" + "x" * 195 == answer.reference


def test_the_executor_gets_amounts_in_minor_units_filled_values_included(world: World):
    sent: list[ExecutionIntent] = []

    class Watching(Hands):
        def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
            sent.append(intent)
            assert key == intent.idempotency_key
            assert deadline_s == world.contract.budget.dispatch_ms_max / 1000
            return Receipt("settled")

    world.rail = Watching()  # type: ignore[assignment]
    world.kernel = world.open_kernel()
    world.decide(refund("40.00"), "C1")
    world.decide(compensate, "C2")
    assert [("REFUND_TICKET", (("amount", 4000),)), ("COMPENSATE", (("amount", 25000),))] == [
        (intent.kind, intent.params) for intent in sent
    ]
    assert ["T1", "1"] == [sent[0].resource_key, sent[0].state_version]


def test_the_executor_gets_the_version_of_the_state_that_was_judged(world: World):
    world.tickets.put("T1")
    world.tickets.put("T1")
    seen: list[str] = []

    class Watching(Hands):
        def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
            seen.append(intent.state_version)
            return Receipt("rejected", detail="the row has moved on")

    world.rail = Watching()  # type: ignore[assignment]
    world.kernel = world.open_kernel()
    answer = world.decide(refund())
    assert (["3"], "ABORTED", "FAILED", "EXECUTION_FAILED") == (seen, answer.state, answer.execution, answer.tag)


class OnFire:
    """An executor that fails whatever it is asked."""

    idempotent = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        raise self._error

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        raise self._error


class WordlessRefusalError(WordlessError, ExecutorError):
    """It says that it could not be asked; but it may have acted before it raised."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("card terminal on fire"), "RuntimeError: card terminal on fire"),
        (WordlessError(), "WordlessError: WordlessError"),
        (WordlessRefusalError(""), "WordlessRefusalError: WordlessRefusalError"),
    ],
)
def test_whatever_an_executor_raises_is_unknown_and_is_on_the_record_with_its_place(
    folder: Path, error: Exception, said: str
):
    world = World(folder)
    world.kernel = world.open_kernel(executor=OnFire(error))
    assert "UNKNOWN" == world.decide(refund()).execution
    (detail,) = world.column("SELECT body ->> '$.detail' FROM ledger WHERE kind = 'UNKNOWN'")
    place = r"test_executor\.py:\d+"
    failed = rf"the executor failed: {said} \({place}\); looked up: unknown: the look-up failed: {said} \({place}\)"
    assert re.fullmatch(failed, str(detail))
    logged = [facts for event, facts in world.logged if event == "executor.failed"]
    assert [said, said] == [facts["error"] for facts in logged]  # type: ignore[index]
    world.close()


def test_keys_that_could_not_be_read_once_are_read_the_next_time() -> None:
    old, new = b"o" * 32, b"n" * 32
    kept: list[tuple[bytes, ...] | None] = [None, (new, old)]
    signer = Signer(old, read_again=lambda: kept.pop(0), stamp=lambda: "another than before")
    assert [key_name(old), key_name(new), key_name(new)] == [signer.sign(b"x").partition(":")[0] for _ in range(3)]

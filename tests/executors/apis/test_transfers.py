"""Transfers that are taken back by the `reverse` of docs/library.md: once, completely, whatever becomes of the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sds.executors.http import HttpExecutor, load_executor, parse_gateway
from sds.kernel.audit import verify
from sds.kernel.contract.schema import parse_contract
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent
from tests.executors.apis.serving import Api, Reply, Request, file_on_page, serving
from tests.executors.apis.stripe import ADDRESS, SECRET, failure
from tests.kernel import world as worlds
from tests.kernel.durable import World, deny, whole
from tests.kernel.sagas import DIRTY, REVERT, Script, parent, run, terms

KEY, DEADLINE_S = "k" * 64, 5.0
SENDS_KEY = """  key_header: Idempotency-Key
  body: form
  fields: {amount: "{params.amount}", metadata: {key: "{key}"}}"""
ORDER = ExecutionIntent("flow-1", KEY, "TRANSFER", (("amount", 500),), "acct_1", "7")


def file_for(url: str) -> str:
    return file_on_page(ADDRESS, "/v1/transfers").replace(ADDRESS, url)


@dataclass
class Transfers(Api):
    """Stripe's transfers and their reversals. `undone`: by key. `short`: the account has too little left to reverse."""

    undone: dict[str, dict[str, Any]] = field(default_factory=dict)
    short: bool = False
    asked: list[Request] = field(default_factory=list)

    def answer(self, request: Request) -> Reply:
        assert f"Bearer {SECRET}" == request.headers["authorization"]
        self.asked.append(request)
        if request.parts[-1] == "reversals":
            status, data = self._reversals(request)
        elif request.method == "POST":
            said = request.form
            made, _ = self.pay(request.key, said["destination"], int(said["amount"]), said["currency"])
            made.metadata = {"key": said["metadata[key]"]}
            status, data = 200, self._shown(made)
        else:
            found = [self._shown(each) for each in self.found() if each.key == request.asked["transfer_group"]]
            status, data = 200, {"object": "list", "data": found, "has_more": False}
        return status, {"Idempotency-Key": request.key} if request.method == "POST" else {}, data

    def _shown(self, made: Any) -> dict[str, Any]:
        said = {"id": made.id, "object": "transfer", "amount": made.amount, "currency": made.currency}
        return {**said, "destination": made.account, "metadata": made.metadata}

    def _reversals(self, request: Request) -> tuple[int, dict[str, Any]]:
        transfer = self.payments[request.parts[-2]]
        ours = [each for each in self.undone.values() if each["transfer"] == transfer.id]
        if request.method == "GET":
            return 200, {"object": "list", "data": ours, "has_more": False}
        if request.key not in self.undone:
            if self.short or ours:
                return failure(400, "invalid_request_error")
            said = request.form
            made = {"id": f"trr-{len(self.undone)}", "object": "transfer_reversal", "transfer": transfer.id}
            made |= {"amount": int(said["amount"]), "currency": transfer.currency}
            self.undone[request.key] = {**made, "metadata": {"key": said["metadata[key]"]}}
        return 200, self.undone[request.key]


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_SECRET_KEY", SECRET)


@contextmanager
def executor_at(api: Transfers, folder: Path) -> Iterator[HttpExecutor]:
    with serving(api) as url:
        (folder / "gateway.yaml").write_text(file_for(url), encoding="utf-8")
        with closing(load_executor(folder / "gateway.yaml")) as executor:
            yield executor


@pytest.mark.usefixtures("secret")
def test_a_transfer_is_taken_back_once_under_a_key_of_its_own_and_found_afterwards(tmp_path: Path) -> None:
    api = Transfers("paid")
    with executor_at(api, tmp_path) as executor:
        done = executor.dispatch(ORDER, KEY, DEADLINE_S)
        assert ("settled", "p-1") == (done.status, done.reference)
        assert "absent" == executor.reverted_order(ORDER, "p-1", DEADLINE_S).status
        assert ("settled", "trr-0") == (
            (undone := executor.revert_order(ORDER, "p-1", DEADLINE_S)).status,
            undone.reference,
        )
        assert "settled" == executor.revert_order(ORDER, "p-1", DEADLINE_S).status
        assert "settled" == executor.reverted_order(ORDER, "p-1", DEADLINE_S).status
        assert 1 == len(api.undone)
        (key,) = api.undone
        assert key != KEY
        assert "unknown" == executor.revert_order(ORDER, "", DEADLINE_S).status  # nobody knows what to take back


@pytest.mark.usefixtures("secret")
def test_a_reversal_that_the_gateway_refuses_is_rejected(tmp_path: Path) -> None:
    api = Transfers("paid", short=True)
    with executor_at(api, tmp_path) as executor:
        executor.dispatch(ORDER, KEY, DEADLINE_S)
        assert "rejected" == executor.revert_order(ORDER, "p-1", DEADLINE_S).status
        assert "absent" == executor.reverted_order(ORDER, "p-1", DEADLINE_S).status


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("short", "loses", "became"),
    [
        (False, False, ("ABORTED", "COMPENSATED", "REVERT")),
        (False, True, ("ABORTED", "COMPENSATED", "REVERT")),
        (True, False, ("ESCALATED", DIRTY, "REVERT")),
    ],
)
def test_a_saga_takes_back_its_transfer_even_if_the_reply_is_lost_and_a_refusal_is_a_humans(
    tmp_path: Path, short: bool, loses: bool, became: tuple[str, str, str]
) -> None:
    api = Transfers("paid", short=short)
    with whole(World(tmp_path, terms=terms())) as world, executor_at(api, tmp_path) as executor:

        def denied(packet: Any) -> bytes:
            api.loses = int(loses)
            return deny(packet)

        found = run(world.open_kernel(executor=executor), world, Script(step_2=denied, compensation=REVERT))
        assert became == parent(found)
        assert (1, 0 if short else 1) == (len(api.payments), len(api.undone))
        assert () == verify.verify(world.store).faults


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("/v1/transfers/{reference}/reversals", "/{nothing}", "`{nothing}` is not a placeholder"),
        (SENDS_KEY, '  body: form\n  fields: {amount: "{params.amount}"}', "must send the reversal's key"),
        ("  settled:", "  unsettled:", "unsettled"),
        ("    settled:", "    pending:", "needs `settled`"),
    ],
)
def test_a_reversal_that_cannot_be_found_out_about_is_refused(old: str, new: str, message: str) -> None:
    before, begins, back = file_for(ADDRESS).partition("reverse:")
    broken = back.replace(old, new)
    assert broken != back
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_gateway(before + begins + broken)


def test_a_gateway_that_may_act_twice_on_one_key_takes_nothing_back() -> None:
    text = file_for(ADDRESS).replace("idempotent: true", "idempotent: false")
    with pytest.raises(UsageError, match="reverse: needs `idempotent: true`"):
        parse_gateway(text)


@pytest.mark.usefixtures("secret")
def test_other_decimals_than_the_contracts_are_refused_in_a_reversal_too(tmp_path: Path) -> None:
    text = file_for(ADDRESS)
    back = text.index("reverse:")
    (tmp_path / "gateway.yaml").write_text(text[:back] + text[back:].replace("{params.amount}", "{params.amount:3}"))
    with closing(load_executor(tmp_path / "gateway.yaml")) as executor, pytest.raises(UsageError, match="3 decimals"):
        executor.check_contract(parse_contract(worlds.edited()))

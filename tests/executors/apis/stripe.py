"""Refunds of Stripe, by its API reference: forms, keys whose first result is kept, lists with the newest first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from tests.executors.apis.serving import Api, Payment, Reply, Request, file_on_page

ADDRESS = "https://api.stripe.com"
SECRET = "sk_test_9d1f0c7e"  # noqa: S105  of these tests
FORM = "application/x-www-form-urlencoded"
KNOWN = re.compile(r"charge|payment_intent|amount|reason|metadata\[[a-z]{1,40}\]")


def failure(status: int, kind: str, code: str = "", message: str = "no words of ours") -> tuple[int, dict[str, Any]]:
    return status, {"error": {"type": kind, "message": message, **({"code": code} if code else {})}}


@dataclass
class Stripe(Api):
    """`saved`: by key, the parameters of its first request that was executed, and its result, an error 500 too.

    `busy`: another request of the same key is executed at the time. `breaks`: orders are carried out, and answered 500.
    """

    charged: int = 500
    saved: dict[str, tuple[dict[str, str], int, dict[str, Any]]] = field(default_factory=dict)
    busy: bool = False
    breaks: bool = False
    listed: list[dict[str, str]] = field(default_factory=list)

    def file(self, url: str) -> str:
        return file_on_page(ADDRESS, "/v1/refunds").replace(ADDRESS, url)

    def forget(self) -> None:
        """Forget the keys, as after a day."""
        self.saved.clear()
        self.known.clear()

    def answer(self, request: Request) -> Reply:
        if request.headers.get("authorization") != f"Bearer {SECRET}":
            status, data = failure(401, "invalid_request_error")
            return status, {}, data
        if request.method == "GET":
            self.listed.append(request.asked)
            status, data = self._list(request.asked)
            return status, {}, data
        self.orders += 1
        status, data, again = self._order(request)
        return status, {"Idempotency-Key": request.key, **({"Idempotent-Replayed": "true"} if again else {})}, data

    def _order(self, request: Request) -> tuple[int, dict[str, Any], bool]:
        """Return the result, and whether it is the kept one of an earlier request."""
        if request.headers.get("content-type") != FORM:
            return *failure(400, "invalid_request_error"), False
        params = request.form
        if self.busy:
            return *failure(409, "idempotency_error", "idempotency_key_in_use"), False
        if request.key in self.saved:
            first, status, data = self.saved[request.key]
            return (status, data, True) if first == params else (*failure(400, "idempotency_error"), False)
        if fault := _fault(params):
            return *fault, False
        status, data = self._refund(params)
        if self.breaks:
            status, data = failure(500, "api_error")
        self.saved[request.key] = params, status, data
        return status, data, False

    def _refund(self, params: dict[str, str]) -> tuple[int, dict[str, Any]]:
        charge = params["charge"]
        left = self.charged - sum(each.amount for each in self.payments.values() if each.account == charge)
        if self.refuses or left == 0:
            return failure(400, "invalid_request_error", "charge_already_refunded")
        amount = int(params.get("amount", left))
        if amount > left:
            return failure(400, "invalid_request_error", message="the amount is greater than what is left")
        metadata = {name[9:-1]: value for name, value in params.items() if name.startswith("metadata[")}
        made = Payment(len(self.payments) + 1, metadata["key"], charge, amount, "eur", self.first, self.hides)
        made.metadata = metadata
        self.payments[made.id] = made
        return 200, self._shown(made)

    def _list(self, asked: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if any(not value for value in asked.values()):
            return failure(400, "invalid_request_error", "parameter_invalid_empty")
        since, until = int(asked.get("created[gte]", 0)), int(asked.get("created[lte]", 10**12))
        found = [each for each in reversed(self.found()) if since <= each.at_s <= until]
        if "charge" in asked:
            found = [each for each in found if each.account == asked["charge"]]
        if "starting_after" in asked:
            if asked["starting_after"] not in self.payments:
                return failure(400, "invalid_request_error", "resource_missing")
            found = list(dropwhile(lambda each: each.id != asked["starting_after"], found))[1:]
        limit = int(asked.get("limit", 10))
        data = [self._shown(each) for each in found[:limit]]
        return 200, {"object": "list", "url": "/v1/refunds", "data": data, "has_more": len(found) > limit}

    def _shown(self, made: Payment) -> dict[str, Any]:
        said = {"id": made.id, "object": "refund", "amount": made.amount, "currency": made.currency}
        said |= {"charge": made.account, "created": made.at_s, "payment_intent": None, "reason": None}
        return {**said, "status": made.status, "metadata": {**made.metadata, "key": made.key}}


def _fault(params: dict[str, str]) -> tuple[int, dict[str, Any]] | None:
    """Return what is wrong with an order's parameters: such a result is not kept."""
    if unknown := [name for name in params if not KNOWN.fullmatch(name)]:
        return failure(400, "invalid_request_error", "parameter_unknown", unknown[0])
    if any(not value for value in params.values()):
        return failure(400, "invalid_request_error", "parameter_invalid_empty")
    if not params.get("amount", "1").isdigit():
        return failure(400, "invalid_request_error", "parameter_invalid_integer")
    if "charge" not in params and "payment_intent" not in params:
        return failure(400, "invalid_request_error", "parameter_missing")
    return None

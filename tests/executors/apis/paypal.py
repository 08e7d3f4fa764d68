"""Refunds of PayPal, by its API reference: tokens that expire, amounts that are texts, short answers unless asked otherwise."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Any

from tests.executors.apis.serving import Api, Payment, Reply, Request, file_on_page

ADDRESS = "https://api-m.paypal.com"
CLIENT_ID, CLIENT_SECRET = "AXq7-client", "EHk2-secret~51"
FORM = "application/x-www-form-urlencoded"
AMOUNTS = {"EUR": r"[0-9]+\.[0-9]{2}", "JPY": "[0-9]+"}


def failure(status: int, name: str, issue: str = "") -> Reply:
    return status, {"Paypal-Debug-Id": "f0"}, {"name": name, "debug_id": "f0", "details": [{"issue": issue}]}


@dataclass
class PayPal(Api):
    """`tokens`: those that are good, in the order in which they were given. `lives_s`: for how long one says that it is.

    `seen`: the keys of all requests for a refund, whatever was answered. `shut`: no token is given.
    """

    tokens: list[str] = field(default_factory=list)
    given: int = 0
    lives_s: Any = 32_400
    shut: bool = False
    seen: list[str] = field(default_factory=list)

    def file(self, url: str) -> str:
        return file_on_page(ADDRESS).replace(ADDRESS, url)

    def expire(self) -> None:
        """End all tokens before their time."""
        self.tokens.clear()

    def forget(self) -> None:
        """Forget the keys, as after their time."""
        self.known.clear()

    def loses_this(self, request: Request) -> bool:
        return request.parts[1] != "oauth2" and super().loses_this(request)

    def answer(self, request: Request) -> Reply:
        if request.parts == ["v1", "oauth2", "token"]:
            return self._token(request)
        if request.method == "POST":
            self.seen.append(request.key)
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            return 401, {}, {"error": "invalid_token", "error_description": "the token has expired"}
        if request.method == "GET":
            found = next((each for each in self.found() if each.id == request.parts[3]), None)
            return (200, {}, self._shown(found)) if found else failure(404, "RESOURCE_NOT_FOUND", "INVALID_RESOURCE_ID")
        return self._refund(request)

    def _token(self, request: Request) -> Reply:
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if self.shut or request.headers.get("authorization") != f"Basic {basic}":
            return 401, {}, {"error": "invalid_client", "error_description": CLIENT_SECRET}
        if request.headers.get("content-type") != FORM or request.form != {"grant_type": "client_credentials"}:
            return 400, {}, {"error": "unsupported_grant_type"}
        self.given += 1
        self.tokens.append(f"A21AA-{self.given}-token")
        return 200, {}, {"access_token": self.tokens[-1], "token_type": "Bearer", "expires_in": self.lives_s}

    def _refund(self, request: Request) -> Reply:
        body = request.json
        value, currency = body["amount"]["value"], body["amount"]["currency_code"]
        if not isinstance(value, str) or not re.fullmatch(AMOUNTS[currency], value):
            return failure(422, "UNPROCESSABLE_ENTITY", "DECIMAL_PRECISION")
        if self.refuses:
            return failure(422, "UNPROCESSABLE_ENTITY", "CAPTURE_FULLY_REFUNDED")
        made, again = self.pay(request.key or f"none-{self.orders}", request.parts[3], value, currency)
        made.metadata["invoice_id"] = body["invoice_id"]
        shown = self._shown(made)
        if request.headers.get("prefer") != "return=representation":
            shown = {name: shown[name] for name in ("id", "status", "links")}
        return 200 if again else 201, {}, shown

    def _shown(self, made: Payment) -> dict[str, Any]:
        links = [{"rel": "self", "method": "GET", "href": f"{ADDRESS}/v2/payments/refunds/{made.id}"}]
        amount = {"value": made.amount, "currency_code": made.currency}
        said = {"id": made.id, "status": made.status, "amount": amount, "links": links}
        return {**said, "invoice_id": made.metadata["invoice_id"]}

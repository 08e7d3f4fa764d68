"""A company's own payment service: amounts are JSON numbers of major units, bodies are signed, pages follow `Link` headers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from tests.executors.apis.serving import Api, Payment, Reply, Request

SECRET = "hm-71c0ffee"  # noqa: S105  of these tests

RULES = """
  settled: [{status: [STATUS], where: {state: done, amount: "{params.amount:2n}", currency: "{currency}"}}]
  pending: [{status: [STATUS], where: {state: taken}}]
  rejected: [{status: [STATUS], where: {state: refused}}]
"""


@dataclass
class LedgerService(Api):
    """Its answers write 5.00 as `5.00`, `5.0` or `5`: `decimals` of its JSON numbers. `bodies`: what was ordered."""

    FILE = f"""
idempotent: true
currency: EUR
signature: {{header: X-Signature, prefix: "sha256=", encoding: base64, secret: {{env: LEDGER_SECRET}}}}
reply: {{key: key, reference: id}}
order:
  path: /payouts
  fields: {{key: "{{key}}", account: "{{resource_key}}", amount: "{{params.amount:2n}}", currency: "{{currency}}"}}
{RULES.replace("STATUS", "201").strip(chr(10))}
lookup:
  path: /payouts/{{key}}
{RULES.replace("STATUS", "200").strip(chr(10))}
  absent: [{{status: [404], where: {{key: "{{key}}"}}}}]
statement:
  path: /payouts?from={{since_ms}}&to={{until_ms}}
  lines: payouts
  next_link: true
  line:
    key: key
    outcome: state
    outcomes: {{done: settled, taken: pending, refused: rejected}}
    at: {{field: at, unit: iso}}
    amount_minor: amount
    decimals: 2
    amounts: number
    reference: id
    resource_key: account
"""
    decimals: int = 2
    bodies: list[bytes] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)

    def answer(self, request: Request) -> Reply:
        digest = hmac.digest(SECRET.encode(), request.content, hashlib.sha256)
        if request.headers.get("x-signature") != f"sha256={base64.b64encode(digest).decode()}":
            return 401, {}, {"state": "refused"}
        if request.method == "POST":
            self.bodies.append(request.content)
            body = json.loads(request.content, parse_float=Decimal)
            made, _ = self.pay(body["key"], body["account"], body["amount"], body["currency"])
            return 201, {}, self._shown(made)
        if len(request.parts) == 1:
            self.pages.append(request.target)
            return self._page(request.target, int(request.asked.get("page", 1)))
        found = next((each for each in self.found() if each.key == request.parts[1]), None)
        return (200, {}, self._shown(found)) if found else (404, {}, {"key": request.parts[1]})

    def _page(self, target: str, number: int) -> Reply:
        listed = self.found()[2 * (number - 1) :]
        start = target.partition("&page=")[0]
        last = f'<{start}&page=9>; rel="last"'
        link = f'<{start}&page={number + 1}>; rel="next", {last}' if len(listed) > 2 else last
        return 200, {"Link": link}, {"payouts": [self._shown(each) for each in listed[:2]]}

    def _shown(self, made: Payment) -> dict[str, Any]:
        amount = float(round(made.amount, self.decimals)) if self.decimals else int(made.amount)
        said = {"id": made.id, "key": made.key, "account": made.account, "amount": amount, "currency": made.currency}
        return {**said, "state": made.status, "at": datetime.fromtimestamp(made.at_s, UTC).isoformat()}

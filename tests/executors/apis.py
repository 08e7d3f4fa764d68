"""Payment APIs as their public documentation describes them, each a server of this machine, and the file that describes it.

They stand for somebody else's systems: what an order became there is in `payments`, and is changed by a test (`end`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Reply = tuple[int, dict[str, str], Any]


@dataclass
class Payment:
    """What one order became. `status` is the word of its API. `hidden`: look-ups do not find it yet."""

    number: int
    key: str
    account: str
    amount: Any
    currency: str
    status: str
    hidden: bool = False

    @property
    def id(self) -> str:
        return f"p-{self.number}"


@dataclass
class Api:
    """`orders`: how many requests were orders. `first`: the status of a new payment, for a test to choose."""

    first: str
    payments: dict[str, Payment] = field(default_factory=dict)
    orders: int = 0
    hides: bool = False
    refuses: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def end(self, status: str) -> None:
        for payment in self.payments.values():
            payment.status = status

    def show(self) -> None:
        for payment in self.payments.values():
            payment.hidden = False

    def pay(self, key: str, account: str, amount: Any, currency: str) -> tuple[Payment, bool]:
        """Return the payment of a key, and whether it was there before: every API here is idempotent."""
        self.orders += 1
        if key in self.payments:
            return self.payments[key], True
        made = Payment(len(self.payments) + 1, key, account, amount, currency, self.first, self.hides)
        self.payments[key] = made
        return made, False

    def found(self) -> list[Payment]:
        return [payment for payment in self.payments.values() if not payment.hidden]

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        raise NotImplementedError


class Stripe(Api):
    """Refunds of Stripe, with JSON in place of form bodies. The look-up is the list of a charge's refunds."""

    FILE = """
idempotent: true
keys_kept_ms: 86400000
currency: eur
reply: {key: metadata.key, reference: id}
order:
  path: /v1/refunds
  key_header: Idempotency-Key
  reply: {key_header: Idempotency-Key, reference: id}
  fields: {charge: "{resource_key}", amount: "{params.amount}", currency: "{currency}", metadata: {key: "{key}"}}
  settled: [{status: [200], where: {status: succeeded, amount: "{params.amount}", currency: "{currency}"}}]
  pending: [{status: [200], where: {status: pending}}]
  rejected: [{status: [402], where: {error.type: card_error}}, {status: [200], where: {status: failed}}]
lookup:
  path: /v1/refunds?charge={resource_key}&limit=100
  entries: data
  settled: [{status: [200], where: {status: succeeded, amount: "{params.amount}", currency: "{currency}"}}]
  pending: [{status: [200], where: {status: pending}}]
  rejected: [{status: [200], where: {status: failed}}]
  absent: [{status: [200], where: {object: list, has_more: false}}]
"""

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        if method == "GET":
            data = [self._shown(each) for each in self.found() if each.account == asked["charge"][0]]
            return 200, {}, {"object": "list", "data": data, "has_more": False}
        if self.refuses:
            error = {"type": "card_error", "code": "card_declined"}
            return 402, {"Idempotency-Key": key}, {"error": error}
        made, again = self.pay(key, body["charge"], body["amount"], body["currency"])
        replayed = {"Idempotent-Replayed": "true"} if again else {}
        return 200, {"Idempotency-Key": key, **replayed}, self._shown(made)

    def _shown(self, made: Payment) -> dict[str, Any]:
        said = {"id": made.id, "object": "refund", "amount": made.amount, "currency": made.currency}
        return {**said, "status": made.status, "metadata": {"key": made.key}}


class Adyen(Api):
    """Refunds of Adyen: every order is only received. What became of it comes by webhook; there is no look-up."""

    FILE = """
idempotent: true
keys_kept_ms: 604800000
currency: EUR
reply: {key: reference, reference: pspReference}
order:
  path: /v71/payments/{resource_key}/refunds
  key_header: Idempotency-Key
  fields:
    amount: {value: "{params.amount}", currency: "{currency}"}
    merchantAccount: Tolls
    reference: "{key}"
  pending: [{status: [201], where: {status: received}}]
"""

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        made, _ = self.pay(key, parts[2], body["amount"]["value"], body["amount"]["currency"])
        said = {"merchantAccount": "Tolls", "paymentPspReference": made.account, "pspReference": made.id}
        return 201, {}, {**said, "reference": body["reference"], "status": "received", "amount": body["amount"]}


class PayPal(Api):
    """Refunds of PayPal: amounts are texts with decimals, and a refund is looked up by PayPal's id of it alone."""

    RULES = """
  settled: [{status: [STATUS], where: {status: COMPLETED, amount.value: "{params.amount:2}",
             amount.currency_code: "{currency}"}}]
  pending: [{status: [STATUS], where: {status: PENDING}}]
  rejected: [{status: [STATUS], where: {status: FAILED}}, {status: [STATUS], where: {status: CANCELLED}}]
"""
    FILE = f"""
idempotent: true
keys_kept_ms: 2592000000
currency: EUR
reply: {{key: invoice_id, reference: id}}
order:
  path: /v2/payments/captures/{{resource_key}}/refund
  key_header: PayPal-Request-Id
  headers: {{Prefer: return=representation}}
  fields:
    amount: {{value: "{{params.amount:2}}", currency_code: "{{currency}}"}}
    invoice_id: "{{key}}"
{RULES.replace("STATUS", "200, 201").strip(chr(10))}
lookup:
  path: /v2/payments/refunds/{{reference}}
{RULES.replace("STATUS", "200").strip(chr(10))}
"""

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        if method == "GET":
            found = next((each for each in self.found() if each.id == parts[3]), None)
            return (200, {}, self._shown(found)) if found else (404, {}, {"name": "RESOURCE_NOT_FOUND"})
        made, again = self.pay(body["invoice_id"], parts[3], body["amount"]["value"], body["amount"]["currency_code"])
        return 200 if again else 201, {}, self._shown(made)

    def _shown(self, made: Payment) -> dict[str, Any]:
        amount = {"value": made.amount, "currency_code": made.currency}
        return {"id": made.id, "status": made.status, "invoice_id": made.key, "amount": amount}


class GoCardless(Api):
    """Refunds of GoCardless: a key that is used again is a conflict; lists have cursors."""

    FILE = """
idempotent: true
keys_kept_ms: 2592000000
currency: EUR
reply: {key: metadata.key, reference: id}
order:
  path: /refunds
  key_header: Idempotency-Key
  headers: {GoCardless-Version: "2015-07-06"}
  reply: {key: refunds.metadata.key, reference: refunds.id}
  fields: {refunds: {amount: "{params.amount}", links: {payment: "{resource_key}"}, metadata: {key: "{key}"}}}
  settled: [{status: [201], where: {refunds.status: paid, refunds.amount: "{params.amount}"}}]
  pending: [{status: [201], where: {refunds.status: created}}]
lookup:
  path: /refunds?payment={resource_key}&limit=500
  entries: refunds
  settled: [{status: [200], where: {status: paid, amount: "{params.amount}", currency: "{currency}"}}]
  pending: [{status: [200], where: {status: created}}, {status: [200], where: {status: submitted}}]
  rejected: [{status: [200], where: {status: cancelled}}, {status: [200], where: {status: bounced}}]
  absent: [{status: [200], where: {meta.limit: 500}}]
"""

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        if method == "GET":
            refunds = [self._shown(each) for each in self.found() if each.account == asked["payment"][0]]
            return 200, {}, {"refunds": refunds, "meta": {"cursors": {"before": None, "after": None}, "limit": 500}}
        ordered = body["refunds"]
        made, again = self.pay(key, ordered["links"]["payment"], ordered["amount"], "EUR")
        if again:
            error = {"reason": "idempotent_creation_conflict", "links": {"conflicting_resource_id": made.id}}
            return 409, {}, {"error": {"type": "invalid_state", "code": 409, "errors": [error]}}
        return 201, {}, {"refunds": self._shown(made)}

    def _shown(self, made: Payment) -> dict[str, Any]:
        said = {"id": made.id, "amount": made.amount, "currency": made.currency, "status": made.status}
        return {**said, "metadata": {"key": made.key}}


class ModernTreasury(Api):
    """Payment orders of Modern Treasury: the look-up, by metadata, answers a list that has no name."""

    FILE = """
idempotent: true
keys_kept_ms: 86400000
currency: EUR
reply: {key: metadata.key, reference: id}
order:
  path: /api/payment_orders
  key_header: Idempotency-Key
  fields:
    type: sepa
    direction: credit
    amount: "{params.amount}"
    currency: "{currency}"
    receiving_account_id: "{resource_key}"
    metadata: {key: "{key}"}
  pending: [{status: [201], where: {status: needs_approval}}, {status: [201], where: {status: approved}}]
lookup:
  path: /api/payment_orders?metadata[key]={key}
  entries: .
  settled: [{status: [200], where: {status: completed, amount: "{params.amount}", currency: "{currency}"}}]
  pending: [{status: [200], where: {status: approved}}, {status: [200], where: {status: sent}}]
  rejected: [{status: [200], where: {status: failed}}, {status: [200], where: {status: cancelled}}]
  absent: [{status: [200]}]
"""

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        if method == "GET":
            return 200, {}, [self._shown(each) for each in self.found() if each.key == asked["metadata[key]"][0]]
        made, _ = self.pay(key, body["receiving_account_id"], body["amount"], body["currency"])
        return 201, {}, self._shown(made)

    def _shown(self, made: Payment) -> dict[str, Any]:
        said = {"id": made.id, "amount": made.amount, "currency": made.currency, "status": made.status}
        return {**said, "metadata": {"key": made.key}}


class Bank(Api):
    """A bank with the words of ISO 20022: an order is received (202), and its end is asked for by the bank's id of it.

    Its end-to-end ids have 35 characters at most.
    """

    FILE = """
idempotent: true
key_form: short
currency: EUR
reply: {key: endToEndId, reference: paymentId}
order:
  path: /payments/sepa-credit-transfers
  key_header: X-Request-ID
  fields:
    endToEndId: "{key}"
    instructedAmount: {amount: "{params.amount:2}", currency: "{currency}"}
    creditorAccount: "{resource_key}"
    remittanceInformation: "{whole_key}"
  pending: [{status: [202], where: {transactionStatus: RCVD}}]
  rejected: [{status: [202], where: {transactionStatus: RJCT}}]
lookup:
  path: /payments/{reference}/status
  settled: [{status: [200], where: {transactionStatus: ACSC, instructedAmount.amount: "{params.amount:2}",
             instructedAmount.currency: "{currency}"}}]
  pending: [{status: [200], where: {transactionStatus: RCVD}}, {status: [200], where: {transactionStatus: PDNG}}]
  rejected: [{status: [200], where: {transactionStatus: RJCT}}]
  absent: [{status: [404], where: {code: RESOURCE_UNKNOWN}}]
  absent_without_key: true
statement:
  path: /payments?from={since_ms}&to={until_ms}&after={after}
  lines: .
  next: -1.paymentId
  line:
    key: remittanceInformation
    outcome: transactionStatus
    outcomes: {ACSC: settled, RJCT: rejected, RCVD: pending, PDNG: pending}
    at: {field: at, unit: iso}
    reference: paymentId
"""

    PAGE = 2

    def answer(self, method: str, parts: list[str], asked: dict[str, list[str]], key: str, body: Any) -> Reply:
        if method == "POST":
            amount = body["instructedAmount"]
            assert len(body["endToEndId"]) <= 35
            made, _ = self.pay(
                body["remittanceInformation"], body["creditorAccount"], amount["amount"], amount["currency"]
            )
            return 202, {}, self._shown(made)
        if len(parts) == 1:
            after = int((asked.get("after") or ["p-0"])[0].removeprefix("p-"))
            listed = [self._shown(each) for each in self.found() if each.number > after]
            return 200, {}, listed[: self.PAGE]
        found = next((each for each in self.found() if each.id == parts[1]), None)
        return (200, {}, self._shown(found)) if found else (404, {}, {"code": "RESOURCE_UNKNOWN"})

    def _shown(self, made: Payment) -> dict[str, Any]:
        amount = {"amount": made.amount, "currency": made.currency}
        said = {"paymentId": made.id, "endToEndId": made.key[:32], "transactionStatus": made.status}
        return {**said, "remittanceInformation": made.key, "instructedAmount": amount, "at": "2026-01-01T00:00:00Z"}


@contextmanager
def serving(api: Api) -> Iterator[str]:
    """Serve an API; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._do()

        def do_GET(self) -> None:
            self._do()

        def _do(self) -> None:
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.split("/") if part]
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            names = ("Idempotency-Key", "PayPal-Request-Id", "X-Request-ID")
            key = next((self.headers[name] for name in names if name in self.headers), "")
            status, headers, data = api.answer(self.command, parts, parse_qs(url.query), key, body)
            content = json.dumps(data).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Adyen, GoCardless, Modern Treasury and a bank: what each has that others have not."""

from __future__ import annotations

from typing import Any

from tests.executors.apis.serving import Api, Payment, Reply, Request


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

    def answer(self, request: Request) -> Reply:
        body = request.json
        made, _ = self.pay(request.key, request.parts[2], body["amount"]["value"], body["amount"]["currency"])
        said = {"merchantAccount": "Tolls", "paymentPspReference": made.account, "pspReference": made.id}
        return 201, {}, {**said, "reference": body["reference"], "status": "received", "amount": body["amount"]}


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

    def answer(self, request: Request) -> Reply:
        if request.method == "GET":
            refunds = [self._shown(each) for each in self.found() if each.account == request.asked["payment"]]
            return 200, {}, {"refunds": refunds, "meta": {"cursors": {"before": None, "after": None}, "limit": 500}}
        ordered = request.json["refunds"]
        made, again = self.pay(request.key, ordered["links"]["payment"], ordered["amount"], "EUR")
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

    def answer(self, request: Request) -> Reply:
        if request.method == "GET":
            return 200, {}, [self._shown(each) for each in self.found() if each.key == request.asked["metadata[key]"]]
        body = request.json
        made, _ = self.pay(request.key, body["receiving_account_id"], body["amount"], body["currency"])
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

    def answer(self, request: Request) -> Reply:
        if request.method == "POST":
            body = request.json
            amount = body["instructedAmount"]
            assert len(body["endToEndId"]) <= 35
            made, _ = self.pay(
                body["remittanceInformation"], body["creditorAccount"], amount["amount"], amount["currency"]
            )
            return 202, {}, self._shown(made)
        if len(request.parts) == 1:
            after = int(request.asked.get("after", "p-0").removeprefix("p-"))
            listed = [self._shown(each) for each in self.found() if each.number > after]
            return 200, {}, listed[: self.PAGE]
        found = next((each for each in self.found() if each.id == request.parts[1]), None)
        return (200, {}, self._shown(found)) if found else (404, {}, {"code": "RESOURCE_UNKNOWN"})

    def _shown(self, made: Payment) -> dict[str, Any]:
        amount = {"amount": made.amount, "currency": made.currency}
        said = {"paymentId": made.id, "endToEndId": made.key[:32], "transactionStatus": made.status}
        return {**said, "remittanceInformation": made.key, "instructedAmount": amount, "at": "2026-01-01T00:00:00Z"}

"""An executor for any payment gateway, made from a file: `load_executor("gateway.yaml")`.

It never guesses. `settled`, `rejected` and `absent` need a whole answer that names the order's own key and fits a rule
of the file. `unsent` means that certainly nothing left this machine. Everything else is `unknown`.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

from pydantic import ValidationError

from sds.executors.http import agreement, answers, bodies, pages, templates
from sds.executors.http.answers import Reading
from sds.executors.http.client import GatewayClient
from sds.executors.http.credentials import TokenError
from sds.executors.http.exchange import GatewayRequest, NoReplyError, NotSentError
from sds.executors.http.form import GatewayForm
from sds.executors.http.questions import GatewayQuestion, LookupForm, Rule
from sds.executors.http.templates import Fact, UnwritableError
from sds.host.input_files import read_text
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.types import say_first
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, load_with_lines
from sds.kernel.errors import ContractError, ExecutorError, UsageError, cause_of
from sds.kernel.executor.protocol import ExecutionIntent, Receipt, Settlement
from sds.kernel.executor.statement import STATEMENT_S_MAX, StatementLine

PAGE_S_MAX = 10.0
PAGE_BYTES_MAX = 4 * 1024 * 1024
GATEWAY_INVALID = "GATEWAY_INVALID"
_FIELDS = "library.md of the documentation says what each field means"


class HttpExecutor:
    """Carries orders out at the gateway that a form describes. Safe in several threads; close it in the end.

    It has `void`, `statement` and the two for reversals only where the form has them. `folder`: where the form's relative
    files lie.
    """

    def __init__(self, form: GatewayForm, folder: Path) -> None:
        self.idempotent, self.keys_kept_ms = form.idempotent, form.keys_kept_ms
        self._form, self._client = form, GatewayClient(form, folder)
        if form.void is not None:
            self.void = self._void
        if form.reverse is not None:
            self.revert_order, self.reverted_order = self._revert_order, self._reverted_order
        if form.statement is not None:
            self.statement = self._statement

    def __repr__(self) -> str:
        return f"HttpExecutor({self._form.address})"

    def close(self) -> None:
        self._client.close()

    def check_contract(self, contract: Contract) -> None:
        """Raise UsageError where the file cannot write an order of a kind, or where file, contract and currency have different
        decimals: an amount would be wrong by a factor of ten or more.
        """
        for what, mend in agreement.faults(self._form, contract):
            raise UsageError(what, hint=mend)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        """Send the order under its key; once more if the token had expired, and the gateway carries out a key only once."""
        order, facts = self._form.order, self._order_facts(intent, key)
        ends_s = time.monotonic() + deadline_s
        try:
            request = self._request(order, facts)
        except UnwritableError as error:
            return Receipt("rejected", detail=f"{error}; nothing was sent")
        try:
            return self._receipt(request, self._reading(order, facts), ends_s, repeatable=self.idempotent)
        except (NotSentError, UsageError) as error:
            return Receipt("unsent", detail=str(error))

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        """Ask for the outcome of `key`, of whose order nothing else is known."""
        return self._ask(self._form.lookup, self._key_facts(key), deadline_s)

    def lookup_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Ask for the outcome of an order. `reference`: the gateway's id of it, "" where that is not known."""
        facts = self._order_facts(intent, intent.idempotency_key)
        return self._ask(self._form.lookup, facts | ({"reference": reference} if reference else {}), deadline_s)

    def _void(self, key: str, deadline_s: float) -> Receipt:
        """Make sure that `key` never has an effect: `rejected` once it is void."""
        return self._ask(self._form.void, self._key_facts(key), deadline_s)

    def _revert_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Take back what an order did, under a key of its own: `settled` once it is undone, `rejected` if it never will be."""
        return self._ask(self._form.reverse, self._reversal_facts(intent, reference), deadline_s)

    def _reverted_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Ask whether it was taken back: `settled`, or `absent` when it certainly was not."""
        form = self._form.reverse.lookup if self._form.reverse else None
        return self._ask(form, self._reversal_facts(intent, reference), deadline_s)

    def _reversal_facts(self, intent: ExecutionIntent, reference: str) -> dict[str, Fact]:
        return templates.reversal_facts(intent, reference, self._form.key_form, self._form.currency)

    def _key_facts(self, key: str) -> dict[str, Fact]:
        return templates.key_facts(key, self._form.key_form, self._form.currency)

    def _order_facts(self, intent: ExecutionIntent, key: str) -> dict[str, Fact]:
        return templates.order_facts(intent, key, self._form.key_form, self._form.currency)

    def _statement(self, since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        """Yield every order of this time span. Raises ExecutorError."""
        form = self._form.statement
        if form is None:
            raise ExecutorError("the gateway's file has no `statement`", hint="describe the statement there")
        period: dict[str, Fact] = {"since_ms": since_ms, "until_ms": until_ms, "currency": self._form.currency}
        period |= {"since_s": since_ms // 1000, "until_s": -(-until_ms // 1000)}
        ends_s = time.monotonic() + STATEMENT_S_MAX  # nobody waits for longer, and pages without a line must end, too
        return pages.lines(form, self._form.address, period, lambda path: self._page(path, ends_s))

    def _ask(self, form: GatewayQuestion | None, facts: Mapping[str, Fact], deadline_s: float) -> Receipt:
        """Ask a question that is no order. `unknown` where it was not sent, because that says nothing of the order itself."""
        if form is None:
            return Receipt("unknown", detail="the gateway's file does not say how to ask")
        ends_s = time.monotonic() + deadline_s
        try:
            return self._receipt(self._request(form, facts), self._reading(form, facts), ends_s, repeatable=True)
        except (NotSentError, UnwritableError, UsageError) as error:
            return Receipt("unknown", detail=str(error))

    def _reading(self, form: GatewayQuestion, facts: Mapping[str, Fact]) -> Reading:
        rules: dict[Settlement, Sequence[Rule]] = {
            "settled": form.settled,
            "rejected": form.rejected,
            "pending": form.pending,
        }
        names = form.reply or self._form.reply
        if not isinstance(form, LookupForm):
            return Reading(rules, names, facts)
        return Reading(rules | {"absent": form.absent}, names, facts, form.entries or "", form.absent_without_key)

    def _receipt(self, request: GatewayRequest, reading: Reading, ends_s: float, *, repeatable: bool) -> Receipt:
        try:
            reply = self._client.ask(request, ends_s, repeatable=repeatable)
        except NoReplyError as error:
            return Receipt("unknown", detail=f"no whole answer from the gateway: {error}")
        found = answers.receipt(reply, reading)
        return Receipt(found.status, self._client.hidden_in(found.reference), found.detail)

    def _request(self, form: GatewayQuestion, facts: Mapping[str, Fact]) -> GatewayRequest:
        headers = {name: templates.header(text, facts) for name, text in form.headers.items()}
        if form.key_header is not None:
            headers[form.key_header] = str(facts["key"])
        content = b""
        if form.fields:
            content = bodies.encoded(templates.written(form.fields, facts), form.body)
            headers["Content-Type"] = bodies.content_type(form.body)
        return GatewayRequest(form.method, templates.path(form.path, facts), headers, content)

    def _page(self, path: str, ends_s: float) -> pages.Page:
        """Return the JSON and the headers of a page of the statement. Raises ExecutorError."""
        try:
            within_s = min(ends_s, time.monotonic() + PAGE_S_MAX)
            request = GatewayRequest("GET", path, {})
            reply = self._client.ask(request, within_s, repeatable=True, body_bytes_max=PAGE_BYTES_MAX)
            if reply.status != HTTPStatus.OK:
                message = f"the gateway answered {reply.status} when it was asked for its statement"
                raise ExecutorError(message, hint="check the path of `statement` and the secret in its file")
            return answers.parsed(reply), reply.headers
        except ValueError as error:
            raise pages.odd(f"the gateway's statement cannot be read: {error}") from None
        except TokenError as error:
            raise ExecutorError(
                f"the gateway gave no statement: {error}", hint="check `authentication` in its file"
            ) from None
        except (NotSentError, NoReplyError) as error:
            hint = "check that the gateway runs and that `address` in its file is right, then try again"
            raise ExecutorError(f"the gateway gave no statement: {error}", hint=hint) from None


def load_executor(path: str | Path) -> HttpExecutor:
    """Make an executor from a gateway file. Raises UsageError in one line, with the file's line."""
    path = Path(path)
    try:
        text = read_text(path, FILE_BYTES_MAX)
    except UsageError as error:
        raise UsageError(str(error), reason_code=GATEWAY_INVALID, hint=error.hint or "check the path") from None
    form = parse_gateway(text, str(path))
    try:
        return HttpExecutor(form, path.parent)
    except (OSError, ssl.SSLError) as error:
        message = f"{path}: its certificates cannot be read: {cause_of(error)}"
        raise UsageError(message, reason_code=GATEWAY_INVALID) from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}", reason_code=GATEWAY_INVALID, hint=error.hint) from None


def parse_gateway(text: str, name: str = "gateway") -> GatewayForm:
    """Return the form in `text`. Raises UsageError with `name` and the line."""
    try:
        data, lines = load_with_lines(text, name)
        return GatewayForm.model_validate(data)
    except ContractError as error:
        raise UsageError(str(error), reason_code=GATEWAY_INVALID, hint=error.hint or _FIELDS) from None
    except ValidationError as error:
        line, message = say_first(error.errors(include_url=False, include_input=False), lines, GatewayForm)
        raise UsageError(f"{name}:{line}: {message}", reason_code=GATEWAY_INVALID, hint=_FIELDS) from None

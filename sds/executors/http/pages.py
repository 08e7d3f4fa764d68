"""Reads a gateway's statement page by page, as lines to compare with the record. Anything odd makes it unreadable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import urljoin

from sds.executors.http import answers, templates
from sds.executors.http.answers import MISSING
from sds.executors.http.form import LineForm, StatementForm, TimeField
from sds.executors.http.questions import is_path
from sds.executors.http.templates import Fact
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.statement import StatementLine

PAGES_MAX = 100_000
LINK_CHARS_MAX = 4096
DIGITS_MAX = 18  # of an amount before its decimal point
EXPONENT_MIN = -36  # of an amount that is a JSON number

Page = tuple[Any, Mapping[str, str]]  # the JSON of a page, and its headers, their names in lower case

_LINK = re.compile(r"""\s*<([^<>]*)>((?:\s*;\s*[\w*-]+(?:=(?:"[^"]*"|[^\s",;]+))?)*)\s*(?:,|$)""", re.ASCII)  # RFC 8288
_REL = re.compile(r""";\s*rel=(?:"([^"]*)"|([^\s",;]+))""", re.IGNORECASE)


def odd(message: str) -> ExecutorError:
    """Return the error for a statement that does not have the form in the gateway's file."""
    return ExecutorError(message, hint="compare a page of the statement with `statement` in the gateway's file")


def lines(
    form: StatementForm, address: str, period: Mapping[str, Fact], page: Callable[[str], Page]
) -> Iterator[StatementLine]:
    """Yield every line. `page(path)` fetches a page; `address`: where all of them are. Raises ExecutorError."""
    first = templates.without_after(form.path) if form.first is None else form.path
    path: str | None = templates.path(first, {**period, "after": form.first or ""})
    seen = set[str]()
    while path is not None:
        if path in seen:
            raise odd("the statement does not end: it names a page twice")
        if len(seen) == PAGES_MAX:
            raise odd(f"the statement has more than {PAGES_MAX} pages")
        seen.add(path)
        data, headers = page(path)
        yield from _lines_of(form, str(period["currency"]), data)
        path = _linked(f"{address}{path}", address, headers) if form.next_link else _after(form, period, data)


def _lines_of(form: StatementForm, currency: str, data: Any) -> Iterator[StatementLine]:
    listed = answers.field(data, form.lines)
    if not isinstance(listed, list):
        raise odd(f"the statement has no list `{form.lines}`")
    for each in listed:
        if _is_ours(form.line, each):
            yield _line(form.line, currency, each)


def _is_ours(form: LineForm, data: Any) -> bool:
    if not all(answers.same(answers.field(data, path), value, {}) for path, value in form.where.items()):
        return False
    return not form.skip_without_key or answers.field(data, form.key) not in (MISSING, None)


def _after(form: StatementForm, period: Mapping[str, Fact], data: Any) -> str | None:
    """Return the path of the page that a field names; None: this one is the last."""
    more = answers.field(data, form.more) if form.more else None
    if form.more and not isinstance(more, bool):
        raise odd(f"the statement does not say by `{form.more}` whether there is a next page")
    following = answers.field(data, form.next) if form.next and more is not False else None
    if following in (None, MISSING, "", False):
        if more:
            raise odd("the statement says that there is a next page, and does not name it")
        return None
    if isinstance(following, bool) or not isinstance(following, str | int):
        raise odd("the statement names its next page by what is neither text nor a whole number")
    return templates.path(form.path, {**period, "after": following})


def _linked(at: str, address: str, headers: Mapping[str, str]) -> str | None:
    """Return the path of the page that an answer's `Link` header names as the next (RFC 8288); None: this one is the last."""
    target = _target(headers.get("link", ""))
    if target is None:
        return None
    path = urljoin(at, target).removeprefix(address)
    if not is_path(path):
        raise odd("the statement's next page is no path at the gateway's own address")
    return path


def _target(header: str) -> str | None:
    """Return the target of the one link whose relation is `next`; None without."""
    if len(header) > LINK_CHARS_MAX:
        raise odd(f"the statement has a `Link` header of more than {LINK_CHARS_MAX} characters")
    targets, at = list[str](), 0
    while at < len(header):
        link = _LINK.match(header, at)
        if link is None:
            raise odd("the statement has a `Link` header that cannot be read")
        relation = _REL.search(link[2])
        if relation and "next" in (relation[1] or relation[2] or "").lower().split():
            targets.append(link[1])
        at = link.end()
    if len(targets) > 1:
        raise odd("the statement names two next pages in its `Link` header")
    return targets[0] if targets else None


def _line(form: LineForm, currency: str, data: Any) -> StatementLine:
    said = answers.field(data, form.outcome)
    outcome = form.outcomes.get(said) if isinstance(said, str) else None
    if outcome is None:
        raise odd("a line of the statement has an outcome that `outcomes` does not list")
    moved_in = _text(data, form.currency) if form.currency else currency
    if form.currency and not moved_in:
        raise odd(f"a line of the statement has an empty `{form.currency}`")
    return StatementLine(
        key=_text(data, form.key),
        outcome=outcome,
        at_ms=_at_ms(form.at, answers.field(data, form.at.field)),
        amount_minor=_number(data, form.amount_minor, form) if form.amount_minor else None,
        reference=_text(data, form.reference) if form.reference else "",
        dfid=_text(data, form.dfid) if form.dfid else "",
        kind=_text(data, form.kind) if form.kind else "",
        params={
            name: _number(data, path, form)
            for name, path in form.params.items()
            if answers.field(data, path) is not MISSING
        },
        resource_key=_text(data, form.resource_key) if form.resource_key else "",
        other_currency="" if moved_in.upper() == currency.upper() else moved_in,
    )


def _text(data: Any, path: str) -> str:
    found = answers.field(data, path)
    if not isinstance(found, str):
        raise odd(f"a line of the statement has no text `{path}`")
    return found


def _number(data: Any, path: str, form: LineForm) -> int:
    """Return an amount in minor units. Where it has `decimals`, it is a text, such as `12.50`, or a JSON number."""
    found, decimals = answers.field(data, path), form.decimals
    if not decimals:
        read = found if type(found) is int else None
    elif form.amounts == "number":
        read = _scaled(found, decimals) if type(found) in (int, Decimal) else None
    else:
        whole = isinstance(found, str) and re.fullmatch(rf"-?[0-9]{{1,{DIGITS_MAX}}}\.[0-9]{{{decimals}}}", found)
        read = int(found.replace(".", "")) if whole else None
    if read is None:
        said = "JSON number" if form.amounts == "number" else "text"
        kind = f"{said} with {decimals} decimals" if decimals else "whole number"
        raise odd(f"a line of the statement has no {kind} `{path}`")
    return read


def _scaled(number: int | Decimal, decimals: int) -> int | None:
    """Return a number of major units in minor ones, exactly; None where it has more decimals, or is too long to be money."""
    exact = Decimal(number)
    exponent = exact.as_tuple().exponent
    if not isinstance(exponent, int) or exponent < EXPONENT_MIN or exact.adjusted() >= DIGITS_MAX:
        return None
    scaled = Fraction(exact) * 10**decimals
    return scaled.numerator if scaled.denominator == 1 else None


def _at_ms(form: TimeField, found: Any) -> int:
    if form.unit == "iso" and isinstance(found, str):
        try:
            at = datetime.fromisoformat(found)
        except ValueError:
            at = None
        if at is not None and at.tzinfo is not None:
            return round(at.timestamp() * 1000)
    elif form.unit != "iso" and type(found) is int:
        return found * 1000 if form.unit == "s" else found
    raise odd(f"a line of the statement has no time `{form.field}`")

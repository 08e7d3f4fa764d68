"""Reads a gateway's statement page by page, as lines to compare with the record. Anything odd makes it unreadable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from sds.executors.http import answers
from sds.executors.http.answers import MISSING
from sds.executors.http.form import LineForm, StatementForm, TimeField
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.statement import StatementLine

PAGES_MAX = 100_000


def odd(message: str) -> ExecutorError:
    """Return the error for a statement that does not have the form in the gateway's file."""
    return ExecutorError(message, hint="compare a page of the statement with `statement` in the gateway's file")


def lines(form: StatementForm, page: Callable[[str], Any]) -> Iterator[StatementLine]:
    """Yield every line. `page(after)` fetches one page. Raises ExecutorError."""
    after, seen = form.first, set[str]()
    for _ in range(PAGES_MAX):
        data = page(after)
        listed = answers.field(data, form.lines)
        if not isinstance(listed, list):
            raise odd(f"the statement has no list `{form.lines}`")
        for each in listed:
            if not form.line.skip_without_key or answers.field(each, form.line.key) not in (MISSING, None):
                yield _line(form.line, each)
        following = answers.field(data, form.next) if form.next else None
        if following in (None, MISSING, "", False):
            return
        if not isinstance(following, str | int) or str(following) in seen:
            raise odd("the statement does not end: it names a page twice")
        after = str(following)
        seen.add(after)
    raise odd(f"the statement has more than {PAGES_MAX} pages")


def _line(form: LineForm, data: Any) -> StatementLine:
    said = answers.field(data, form.outcome)
    outcome = form.outcomes.get(said) if isinstance(said, str) else None
    if outcome is None:
        raise odd("a line of the statement has an outcome that `outcomes` does not list")
    return StatementLine(
        key=_text(data, form.key),
        outcome=outcome,
        at_ms=_at_ms(form.at, answers.field(data, form.at.field)),
        amount_minor=_number(data, form.amount_minor, form.decimals) if form.amount_minor else None,
        reference=_text(data, form.reference) if form.reference else "",
        dfid=_text(data, form.dfid) if form.dfid else "",
        kind=_text(data, form.kind) if form.kind else "",
        params={
            name: _number(data, path, form.decimals)
            for name, path in form.params.items()
            if answers.field(data, path) is not MISSING
        },
        resource_key=_text(data, form.resource_key) if form.resource_key else "",
    )


def _text(data: Any, path: str) -> str:
    found = answers.field(data, path)
    if not isinstance(found, str):
        raise odd(f"a line of the statement has no text `{path}`")
    return found


def _number(data: Any, path: str, decimals: int) -> int:
    """Return a number in minor units; where it has `decimals`, it is a text, such as `12.50`."""
    found = answers.field(data, path)
    if decimals and isinstance(found, str) and re.fullmatch(rf"-?[0-9]{{1,18}}\.[0-9]{{{decimals}}}", found):
        return int(found.replace(".", ""))
    if decimals or type(found) is not int:
        kind = f"text with {decimals} decimals" if decimals else "whole number"
        raise odd(f"a line of the statement has no {kind} `{path}`")
    return found


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

"""Reads a gateway's answer strictly: it is `unknown` unless it is whole JSON, names our key, and fits exactly one rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sds.executors.http.exchange import Reply
from sds.executors.http.form import ReplyForm, Rule
from sds.kernel.canonical import one_line
from sds.kernel.executor.protocol import Receipt, Settlement
from sds.kernel.flow.intake import once

REFERENCE_CHARS_MAX = 200
MISSING = object()


def receipt(reply: Reply, key: str, rules: Mapping[Settlement, Sequence[Rule]], form: ReplyForm) -> Receipt:
    """Return the receipt of an answer to a question about `key`. An answer that fits rules of two outcomes is `unknown`."""
    answered = f"the gateway answered {reply.status}"
    try:
        data = parsed(reply)
    except ValueError as error:
        return Receipt("unknown", detail=f"{answered}: {error}")
    named = reply.headers.get(form.key_header.lower()) if form.key_header else field(data, form.key or "")
    if named != key:
        return Receipt("unknown", detail=f"{answered}, but the answer does not name this order's key")
    fits = [outcome for outcome, those in rules.items() if any(_fits(rule, reply.status, data) for rule in those)]
    if len(fits) != 1:
        fit = "rules of two outcomes fit" if fits else "no rule fits"
        return Receipt("unknown", detail=f"{answered}: {fit} the answer")
    reference = field(data, form.reference) if form.reference else ""
    if fits[0] == "settled" and (not isinstance(reference, str | int) or (form.reference and reference == "")):
        return Receipt("unknown", detail=f"{answered}: settled, but the answer has no `{form.reference}`")
    shown = one_line(reference, REFERENCE_CHARS_MAX) if fits[0] == "settled" else ""
    return Receipt(fits[0], shown, "" if fits[0] == "settled" else answered)


def parsed(reply: Reply) -> Any:
    """Return the JSON of an answer. Raises ValueError where it is not whole, not JSON, or has a name twice in one object."""
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("its body has a content encoding that was not asked for")
    try:
        return json.loads(reply.body.decode("utf-8"), object_pairs_hook=once, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError("its body is not valid JSON") from error


def field(data: Any, path: str) -> Any:
    """Return the value at a path of names, or of indices into lists; MISSING where there is none."""
    for name in path.split("."):
        if isinstance(data, dict) and name in data:
            data = data[name]
        elif isinstance(data, list) and name.isascii() and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
        else:
            return MISSING
    return data


def _fits(rule: Rule, status: int, data: Any) -> bool:
    return status in rule.status and all(_same(field(data, path), value) for path, value in rule.where.items())


def _same(found: Any, wanted: str | int | bool) -> bool:
    return type(found) is type(wanted) and bool(found == wanted)


def no_number(text: str) -> float:
    """Refuse NaN and Infinity, which JSON does not have: `json.loads(..., parse_constant=no_number)`."""
    raise ValueError(f"{text} is not a number")

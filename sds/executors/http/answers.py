"""Reads a gateway's answer strictly: it is `unknown` unless it is whole JSON, names our key, and fits exactly one rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from sds.executors.http.exchange import Reply
from sds.executors.http.questions import WHOLE, ReplyForm, Rule
from sds.executors.http.templates import Fact, UnwritableError, written
from sds.kernel.canonical import no_number, one_line
from sds.kernel.executor.protocol import REFERENCE_CHARS_MAX, Receipt, Settlement
from sds.kernel.flow.intake import once

MISSING = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answer to a question is read. `facts`: what was ordered, with the key, for the values in rules.

    `listed`: the field of the list that our order is an entry of; "": the whole answer is about our order. With
    `absent_without_key` an answer that names no key may say that there is no such order.
    """

    rules: Mapping[Settlement, Sequence[Rule]]
    names: ReplyForm
    facts: Mapping[str, Fact]
    listed: str = ""
    absent_without_key: bool = False


class _OddError(ValueError):
    """An answer that is about something else, or not readable as one about our order."""


def receipt(reply: Reply, reading: Reading) -> Receipt:
    """Return the receipt of an answer. An answer that fits rules of two outcomes is `unknown`."""
    answered = f"the gateway answered {reply.status}"
    try:
        data, rules = _about_order(reply, parsed(reply), reading)
    except _OddError as error:
        return Receipt("unknown", detail=f"{answered}, {error}")
    except ValueError as error:
        return Receipt("unknown", detail=f"{answered}: {error}")
    fits = [each for each, those in rules.items() if any(_fits(rule, reply.status, data, reading) for rule in those)]
    if len(fits) != 1:
        fit = "rules of two outcomes fit" if fits else "no rule fits"
        return Receipt("unknown", detail=f"{answered}: {fit} the answer")
    shown = _reference(data, reading.names.reference)
    if fits[0] == "settled" and shown is None:
        return Receipt("unknown", detail=f"{answered}: settled, but the answer has no `{reading.names.reference}`")
    if fits[0] in ("settled", "pending"):
        return Receipt(
            fits[0], shown or "", "" if fits[0] == "settled" else f"{answered}: accepted, not carried out yet"
        )
    return Receipt(fits[0], detail=answered)


def _about_order(reply: Reply, data: Any, reading: Reading) -> tuple[Any, Mapping[Settlement, Sequence[Rule]]]:
    """Return the part of an answer that is about our order, and the rules it may fit. Raises _OddError."""
    absent: Mapping[Settlement, Sequence[Rule]] = {"absent": reading.rules.get("absent", ())}
    names, key = reading.names, reading.facts["key"]
    if reading.listed:
        entries = field(data, reading.listed)
        if not isinstance(entries, list):
            raise _OddError(f"but the answer has no list `{reading.listed}`")
        ours = [entry for entry in entries if field(entry, names.key or "") == key]
        if len(ours) > 1:
            raise _OddError(f"but the answer lists this order's key {len(ours)} times")
        if not ours:
            return data, absent
        return ours[0], {outcome: rules for outcome, rules in reading.rules.items() if outcome != "absent"}
    named = reply.headers.get(names.key_header.lower(), MISSING) if names.key_header else field(data, names.key or "")
    if named == key:
        return data, reading.rules
    if named is MISSING and reading.absent_without_key:
        return data, absent
    raise _OddError("but the answer does not name this order's key")


def _reference(data: Any, path: str | None) -> str | None:
    """Return the gateway's id of the effect; None where it has none that can be shown. "" where nobody asks for it."""
    if path is None:
        return ""
    found = field(data, path)
    return one_line(found, REFERENCE_CHARS_MAX) or None if type(found) in (str, int) else None


def parsed(reply: Reply) -> Any:
    """Return the JSON of an answer. Raises ValueError where it is not whole, not JSON, or has a name twice in one object."""
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("its body has a content encoding that was not asked for")
    try:
        return json.loads(
            reply.body.decode("utf-8"), object_pairs_hook=once, parse_constant=no_number, parse_float=_exact
        )
    except (ValueError, RecursionError) as error:
        raise ValueError("its body is not valid JSON") from error


def field(data: Any, path: str) -> Any:
    """Return the value at a path of names, or of indices into lists, -1 for the last; MISSING where there is none."""
    for name in () if path == WHOLE else path.split("."):
        if isinstance(data, dict) and name in data:
            data = data[name]
        elif isinstance(data, list) and name.isascii() and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
        elif isinstance(data, list) and name == "-1" and data:
            data = data[-1]
        else:
            return MISSING
    return data


def _fits(rule: Rule, status: int, data: Any, reading: Reading) -> bool:
    return status in rule.status and all(
        same(field(data, path), value, reading.facts) for path, value in rule.where.items()
    )


def same(found: Any, value: str | int | bool, facts: Mapping[str, Fact]) -> bool:
    """Tell whether a field has the value of a rule, its facts filled in, and its type. A fact that is missing fits nothing."""
    try:
        wanted = written(value, facts)
    except UnwritableError:
        return False
    if isinstance(wanted, Decimal):  # 12.50 and 12.5 are one number, and so are 12.00 and 12
        return type(found) in (int, Decimal) and bool(found == wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def _exact(text: str) -> Decimal:
    """Return a number of JSON with every digit it has. Raises ValueError where its exponent is beyond what can be held."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:40]} is not a number that can be held") from None

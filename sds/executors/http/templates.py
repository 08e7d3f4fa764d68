"""Texts of a gateway file with placeholders for facts of the order: `/payments/{key}`, `{params.amount}`, `{params.amount:2}`.

A text that is one placeholder and nothing else becomes the fact itself: a number stays a number. `:2` writes a number
of minor units as a text with two decimals, `:2n` as a number with two decimals, exactly. Braces have no other use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Literal
from urllib.parse import quote

from sds.kernel.envelope.envelope import format_literal
from sds.kernel.executor.protocol import ExecutionIntent

Fact = str | int
KeyForm = Literal["whole", "short", "uuid"]
Tree = str | int | bool | Decimal | list["Tree"] | dict[str, "Tree"]

KEY_FACTS = frozenset({"key", "whole_key", "currency"})
SHORT_KEY_CHARS = 32  # of a key's 64 hexadecimal digits: 128 bits
ORDER_FACTS = KEY_FACTS | {"kind", "dfid", "resource_key", "state_version"}
LOOKUP_FACTS = ORDER_FACTS | {"reference"}  # the gateway's id of an order that it has accepted
REVERSAL_FACTS = LOOKUP_FACTS | {"order_key"}  # `key` and `whole_key` are the reversal's own
PERIOD_FACTS = frozenset({"since_ms", "until_ms", "since_s", "until_s", "after", "currency"})

_PLACE = re.compile(r"\{([a-z][a-z0-9_.]*)(?::([1-9])(n?))?\}")
_PARAMS = "params."


class UnwritableError(ValueError):
    """A text cannot be written with this order's facts, so certainly nothing was sent."""


def texts_in(tree: object) -> Iterator[str]:
    """Yield every text in nested mappings and lists, but not the keys."""
    if isinstance(tree, str):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from texts_in(each)


def unknown_place(text: str, known: frozenset[str], *, params: bool) -> str | None:
    """Return the first thing in braces that is no known fact, or a lone brace; None without. `params`: numbers are known."""
    for place in _PLACE.finditer(text):
        name = place[1]
        if name not in known and not (params and name.startswith(_PARAMS)):
            return f"{{{name}}}"
    rest = _PLACE.sub("", text)
    return next((brace for brace in "{}" if brace in rest), None)


def misplaced_number(text: str, *, field: bool) -> str | None:
    """Return the first placeholder of a number with decimals that is not the whole value of a `field`; None without."""
    return next((place[0] for place in _PLACE.finditer(text) if place[3] and not (field and place[0] == text)), None)


def params_in(texts: Iterable[str]) -> Iterator[str]:
    """Yield each parameter that a text names."""
    for place in (place for text in texts for place in _PLACE.finditer(text)):
        if place[1].startswith(_PARAMS):
            yield place[1].removeprefix(_PARAMS)


def decimals_of_params(texts: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each parameter that a text writes with decimals, and with how many."""
    for place in (place for text in texts for place in _PLACE.finditer(text)):
        if place[2] and place[1].startswith(_PARAMS):
            yield place[1].removeprefix(_PARAMS), int(place[2])


def without_after(text: str) -> str:
    """Return the path of a statement's first page: without the parameter of its query that names the page, `after={after}`."""
    path, _, query = text.partition("?")
    kept = [part for part in query.split("&") if part and not part.endswith("={after}")]
    return f"{path}?{'&'.join(kept)}" if kept else path


def key_facts(key: str, form: KeyForm, currency: str) -> dict[str, Fact]:
    """Return the facts that a text may name when no more than the key is known."""
    return {"key": _written_key(key, form), "whole_key": key, "currency": currency}


def _written_key(key: str, form: KeyForm) -> str:
    """Return a key in the form that its gateway takes, always the same for the same key. `uuid`: of version 4 (RFC 9562)."""
    if form == "uuid":
        return f"{key[:8]}-{key[8:12]}-4{key[13:16]}-a{key[17:20]}-{key[20:32]}"
    return key if form == "whole" else key[:SHORT_KEY_CHARS]


def order_facts(intent: ExecutionIntent, key: str, form: KeyForm, currency: str) -> dict[str, Fact]:
    """Return every fact of an order that a template may name."""
    facts: dict[str, Fact] = {
        "kind": intent.kind,
        "dfid": intent.dfid,
        "resource_key": intent.resource_key,
        "state_version": intent.state_version,
    }
    facts |= key_facts(key, form, currency)
    return facts | {f"{_PARAMS}{name}": number for name, number in intent.params}


def reversal_facts(intent: ExecutionIntent, reference: str, form: KeyForm, currency: str) -> dict[str, Fact]:
    """Return the facts of an order's reversal. `reference`: the gateway's id of what is to be undone, "" without one."""
    key = intent.idempotency_key
    facts = order_facts(intent, hashlib.sha256(f"{key}:reverse".encode()).hexdigest(), form, currency)
    facts["order_key"] = _written_key(key, form)
    return facts | ({"reference": reference} if reference else {})


def written(tree: Tree, facts: Mapping[str, Fact]) -> Tree:
    """Return nested mappings and lists with every text filled in. Raises UnwritableError."""
    if isinstance(tree, str):
        whole = _PLACE.fullmatch(tree)
        return _fact(whole, facts) if whole else filled(tree, facts)
    if isinstance(tree, dict):
        return {name: written(each, facts) for name, each in tree.items()}
    return [written(each, facts) for each in tree] if isinstance(tree, list) else tree


def filled(text: str, facts: Mapping[str, Fact]) -> str:
    """Return a text with its placeholders filled in. Raises UnwritableError."""
    return _PLACE.sub(lambda place: str(_fact(place, facts)), text)


def path(text: str, facts: Mapping[str, Fact]) -> str:
    """Return a path and query with its placeholders filled in, each escaped so that it stays one part.

    Raises UnwritableError, also for values that name another place however they are escaped: nothing, `.` and `..`.
    """

    def escaped(place: re.Match[str]) -> str:
        value = str(_fact(place, facts))
        if value in ("", ".", "..") and place[1] != "after":
            raise UnwritableError(f"`{place[1]}` is `{value}`, which cannot be a part of a path")
        return quote(value, safe="")

    return _PLACE.sub(escaped, text)


def header(text: str, facts: Mapping[str, Fact]) -> str:
    """Return a header's value with its placeholders filled in. Raises UnwritableError for what a header cannot hold."""
    value = filled(text, facts)
    if not value.isascii() or not value.isprintable():
        raise UnwritableError("the value of a header must be printable ASCII")
    return value


def _fact(place: re.Match[str], facts: Mapping[str, Fact]) -> Fact | Decimal:
    fact, decimals = facts.get(place[1]), place[2]
    if fact is None:
        raise UnwritableError(f"the order has no `{place[1]}`")
    if decimals is None:
        return fact
    if not isinstance(fact, int):
        raise UnwritableError(f"`{place[1]}` is not a number")
    literal = format_literal(fact, int(decimals))
    return Decimal(literal) if place[3] else literal

"""The bodies of requests: JSON, or a form, whose nested names stand in brackets: `metadata[order]`, `lines[0][amount]`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Literal
from urllib.parse import urlencode

from sds.executors.http.templates import Tree, UnwritableError

BodyForm = Literal["json", "form"]

_TYPES = {"json": "application/json", "form": "application/x-www-form-urlencoded"}


def content_type(form: BodyForm) -> str:
    return _TYPES[form]


def encoded(tree: Tree, form: BodyForm) -> bytes:
    """Return the bytes of a body. Raises UnwritableError for a text that UTF-8 does not have."""
    if form == "json":
        return _json(tree).encode()
    try:
        return urlencode(list(_pairs(tree))).encode()
    except UnicodeEncodeError:
        raise UnwritableError("a field has a text that UTF-8 does not have") from None


def unwritable_in_form(tree: object) -> str | None:
    """Return what keeps `fields` from being written as a form; None: nothing does."""
    if isinstance(tree, dict | list) and not tree:
        return "must not have an empty mapping or list: a form has no name for it"
    if isinstance(tree, dict):
        for name in tree:
            if not name or {"[", "]"} & set(name):
                return f"`{name[:40]}` is not a name in a form: nest a mapping for `a[b]`, as in `a: {{b: ...}}`"
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((fault for part in parts if (fault := unwritable_in_form(part))), None)


def _json(tree: Tree) -> str:
    """Return JSON in ASCII. A Decimal keeps its digits, which no float does."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_json(each)}" for name, each in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_json, tree)) + "]"
    return _plain(tree) if isinstance(tree, Decimal) else json.dumps(tree)


def _pairs(tree: Tree, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) of every field of a form."""
    if isinstance(tree, dict):
        for key, each in tree.items():
            yield from _pairs(each, f"{name}[{key}]" if name else key)
    elif isinstance(tree, list):
        for index, each in enumerate(tree):
            yield from _pairs(each, f"{name}[{index}]")
    elif isinstance(tree, bool):
        yield name, "true" if tree else "false"
    else:
        yield name, _plain(tree) if isinstance(tree, Decimal) else str(tree)


def _plain(number: Decimal) -> str:
    return format(number, "f")

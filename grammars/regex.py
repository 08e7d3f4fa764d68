"""The nodes of a language as one regular expression over the whole proposal, read alike by Python `re` and Rust engines."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sds.grammars.nodes import Choice, Literal, Node, Number
from sds.grammars.number_regex import REGEX_CHARS_MAX, number_regex
from sds.kernel.errors import LanguageError

TEXT_CLASS = r"[ !#-\[\]-~]"
# Within the characters a language can hold, only these mean something to an engine.
_SPECIAL = re.compile(r"([{}.])")


def emit(root: Iterable[Node]) -> str:
    """Return the expression that must match the whole of the bytes. Raises LanguageError beyond REGEX_CHARS_MAX."""
    regex = _sequence(root)
    if len(regex) > REGEX_CHARS_MAX:
        raise LanguageError(f"the language needs an expression of more than {REGEX_CHARS_MAX} characters")
    return regex


def _sequence(nodes: Iterable[Node]) -> str:
    return "".join(map(_node, nodes))


def _node(node: Node) -> str:
    if isinstance(node, Literal):
        return _SPECIAL.sub(r"\\\1", node.text.decode("ascii"))
    if isinstance(node, Choice):
        return f"(?:{'|'.join(_sequence(option.then) for option in node.options)})"
    if isinstance(node, Number):
        return number_regex(node.bound)
    return f"{TEXT_CLASS}{{0,{node.chars_max}}}"

"""The language as GBNF, the grammar of llama.cpp's sampler and server. The root rule is `root`.

llama.cpp expands every count into that many rules. Some versions refuse a count of 2,000; others silently read any
larger one as *unbounded*. So no count here exceeds REPEAT_MAX: a longer text is a chain of blocks, and the length alone
decides which alternative applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sds.grammars.language import TEXT_CLASS, Choice, Language, Literal, Node, Number, Text
from sds.grammars.number_regex import number_regex
from sds.kernel.errors import LanguageError

GBNF_CHARS_MAX = 262_144
REPEAT_MAX = 100
# The parts of a number's expression: classes with counts, groups, and between them digits, the sign and the point.
_NUMBER_PART = re.compile(r"(?P<same>\[[0-9-]+\](?:\{[0-9]+\})?|[|)])|(?P<open>\(\?:)|(?P<text>(?:[-0-9]|\\\.)+)")


def to_gbnf(language: Language) -> str:
    """Return the grammar. Raises LanguageError beyond GBNF_CHARS_MAX, or where a number has no expression."""
    text = dict[str, str]()
    root = _sequence(language.root, text)
    grammar = "\n".join([f"root ::= {root}", *(f"{name} ::= {rule}" for name, rule in text.items()), ""])
    if len(grammar) > GBNF_CHARS_MAX:
        raise LanguageError(f"the language needs a grammar of more than {GBNF_CHARS_MAX} characters")
    return grammar


def _sequence(nodes: Iterable[Node], text: dict[str, str]) -> str:
    return " ".join(_node(node, text) for node in nodes)


def _node(node: Node, text: dict[str, str]) -> str:
    """Return the node as an expression; add the rules that a text needs to `text`."""
    if isinstance(node, Literal):
        return _quoted(node.text.decode("ascii"))
    if isinstance(node, Choice):
        return f"({' | '.join(_sequence(option.then, text) for option in node.options)})"
    if isinstance(node, Number):
        return " ".join(_number(number_regex(node.bound)))
    text.update(_text_rules(node))
    return f"text-{node.chars_max}"


def _number(regex: str) -> Iterator[str]:
    at = 0
    while at < len(regex):
        part = _NUMBER_PART.match(regex, at)
        if part is None:
            raise LanguageError(f"no GBNF for `{regex[at : at + 20]}` of a number", reason_code="LANGUAGE_INVALID")
        at = part.end()
        if part["same"]:
            yield part["same"]
        else:
            yield "(" if part["open"] else _quoted(part["text"].replace("\\", ""))


def _text_rules(text: Text) -> Iterator[tuple[str, str]]:
    """Yield the rules by which `text-N` is at most N characters: fewer than a block, or a block and the rest."""
    left = text.chars_max
    if left > REPEAT_MAX:
        yield "text-block", f"{TEXT_CLASS}{{{REPEAT_MAX}}}"
        yield "text-short", f"{TEXT_CLASS}{{0,{REPEAT_MAX - 1}}}"
    while left > REPEAT_MAX:
        yield f"text-{left}", f"text-short | text-block text-{left - REPEAT_MAX}"
        left -= REPEAT_MAX
    yield f"text-{left}", f"{TEXT_CLASS}{{0,{left}}}"


def _quoted(plain: str) -> str:
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

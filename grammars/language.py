"""The language of one envelope: every proposal that the envelope permits, and nothing else.

    {"action":"REFUND_TICKET","params":{"amount":150.00},"reason":"CANCELLATION","context_ref":"<64 hex>"}
    {"action":"DENY","reason":"NOT_ELIGIBLE","context_ref":"<64 hex>"}

The order of the fields is part of the language. A kind without parameters has no `"params"`. Where the envelope permits
a rationale, `"rationale"` comes first: the model reasons, then it decides. The last field is the same for all kinds, so
nothing is left to choose after the reason. Values that the kernel fills in are not in the language.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sds.grammars.number_regex import REGEX_CHARS_MAX, number_regex
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound, format_literal
from sds.kernel.errors import LanguageError

FORM = "sds-language/4 rationale?,action,params?,reason,context_ref"
CHOICE_VALUES_MAX = 64
PARAMS_MAX = 16
TEXT_CHARS_MAX = 2000

_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_PARAM = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CONTEXT = re.compile(r"[0-9a-f]{64}")
TEXT_CLASS = r"[ !#-\[\]-~]"
# Of the characters in a language's literals, only these are special in a regular expression.
_SPECIAL = re.compile(r"([{}.])")


# The nodes of a language. Only numbers and text repeat anything.


@dataclass(frozen=True, slots=True)
class Literal:
    """Forced bytes. Two literals never stand side by side, so all bytes that are forced in one place are in one literal."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One alternative of a choice. `then` begins with a literal, whose bytes tell it from the other options."""

    label: str
    then: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Two or more options, of which exactly one is written."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """The literal of an integer of `bound`, which has two or more."""

    name: str
    bound: Bound


@dataclass(frozen=True, slots=True)
class Text:
    """At most `chars_max` characters of printable ASCII without the quote and the backslash; possibly none."""

    name: str
    chars_max: int


Node: TypeAlias = Literal | Choice | Number | Text


@dataclass(frozen=True)
class Language:
    """All byte strings that spell a decision of `envelope` with this `context_ref`. Build one with `language()`."""

    root: tuple[Node, ...]
    envelope: DecisionEnvelope
    context_ref: str

    def regex(self) -> str:
        """Return the expression that matches exactly these bytes. Python `re` and the Rust engines read it alike.

        Raises LanguageError beyond REGEX_CHARS_MAX.
        """
        regex = _sequence_regex(self.root)
        if len(regex) > REGEX_CHARS_MAX:
            raise LanguageError(f"the language needs an expression of more than {REGEX_CHARS_MAX} characters")
        return regex

    def lark(self) -> str:
        """Return the language in llguidance's dialect of Lark, as one terminal. Raises LanguageError as `regex` does.

        One terminal, because llguidance reads terminals greedily: a number in a terminal of its own would compete with
        a longer number beside it. Within one expression, its lexer knows every byte that is forced.
        """
        return f"start: /{self.regex()}/\n"

    @property
    def hash(self) -> str:
        """SHA-256 of the form and the regular expression, 64 hexadecimal digits."""
        return hashlib.sha256(f"{FORM}\n{self.regex()}".encode()).hexdigest()


def language(envelope: DecisionEnvelope, context_ref: str) -> Language:
    """Return the language of an envelope. Raises LanguageError for a name or a size that the form cannot write."""
    if not _CONTEXT.fullmatch(context_ref):
        raise LanguageError("the context reference is not 64 hexadecimal digits", reason_code="LANGUAGE_INVALID")
    if not 0 <= envelope.rationale_chars_max <= TEXT_CHARS_MAX:
        raise LanguageError(
            f"a rationale of `{envelope.rationale_chars_max}` characters is not within 0..{TEXT_CHARS_MAX}"
        )
    opening: list[Node] = [Literal(b"{")]
    if envelope.rationale_chars_max:
        opening += [Literal(b'"rationale":"'), Text("rationale", envelope.rationale_chars_max), Literal(b'",')]
    opening.append(Literal(b'"action":"'))
    tail = Literal(f'","context_ref":"{context_ref}"}}'.encode())
    kinds = [Option(kind.kind, _join_literals(_kind_nodes(kind))) for kind in envelope.kinds]
    _check_codes([option.label for option in kinds], "kind")
    return Language(_join_literals([*opening, *_choice_nodes("action", kinds), tail]), envelope, context_ref)


def _kind_nodes(kind: KindBound) -> Iterable[Node]:
    _check_codes(kind.reasons, "reason code")
    names = [name for name, _ in kind.params]
    if len(names) > PARAMS_MAX or len(set(names)) < len(names) or not all(map(_PARAM.fullmatch, names)):
        raise LanguageError(f"`{kind.kind}` has parameters that a proposal cannot hold", reason_code="LANGUAGE_INVALID")
    yield Literal(f'{kind.kind}",'.encode())
    start = '"params":{'
    for name, allowed in kind.params:
        yield Literal(f'{start}"{name}":'.encode())
        yield _number_node(name, allowed)
        start = ","
    yield Literal(b'},"reason":"' if kind.params else b'"reason":"')
    yield from _choice_nodes("reason_code", [Option(code, (Literal(code.encode()),)) for code in kind.reasons])


def _number_node(name: str, allowed: Bound) -> Node:
    if allowed.lo == allowed.hi:
        return Literal(format_literal(allowed.lo, allowed.scale).encode())
    return Number(name, allowed)


def _choice_nodes(name: str, options: list[Option]) -> tuple[Node, ...]:
    return options[0].then if len(options) == 1 else (Choice(name, tuple(options)),)


def _check_codes(codes: Sequence[str], what: str) -> None:
    if not codes or len(set(codes)) < len(codes):
        raise LanguageError(f"a {what} is missing or given twice", reason_code="LANGUAGE_INVALID")
    for code in codes:
        if not _CODE.fullmatch(code):
            raise LanguageError(f"`{code}` is not a {what} that a proposal can hold", reason_code="LANGUAGE_INVALID")


def _join_literals(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes with neighbouring literals joined."""
    joined: list[Node] = []
    for node in nodes:
        if isinstance(node, Literal) and joined and isinstance(last := joined[-1], Literal):
            joined[-1] = Literal(last.text + node.text)
        else:
            joined.append(node)
    return tuple(joined)


def _sequence_regex(nodes: Iterable[Node]) -> str:
    return "".join(map(_node_regex, nodes))


def _node_regex(node: Node) -> str:
    if isinstance(node, Literal):
        return _SPECIAL.sub(r"\\\1", node.text.decode("ascii"))
    if isinstance(node, Choice):
        return f"(?:{'|'.join(_sequence_regex(option.then) for option in node.options)})"
    if isinstance(node, Number):
        return number_regex(node.bound)
    return f"{TEXT_CLASS}{{0,{node.chars_max}}}"

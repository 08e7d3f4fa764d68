"""The language of one envelope: every proposal it permits, and nothing else.

    {"action":"REFUND_TICKET","params":{"amount":150.00},"reason_code":"CANCELLATION","context_ref":"<64 hex>"}

The order of the fields is part of the language. Where the envelope bounds a rationale, `"rationale"` comes first: the
model reasons, then it decides. The last field is a constant, shared by all kinds: once the reason is chosen nothing is
left to decide. What the kernel fills in itself is not in the language.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sds.grammars import emit_regex
from sds.grammars.nodes import Choice, Literal, Node, Number, Option, Text
from sds.kernel.envelope import Bound, DecisionEnvelope, KindBound, format_literal
from sds.kernel.errors import LanguageError

__all__ = ["Choice", "ChoiceView", "Language", "Literal", "Node", "Number", "Option", "Text", "language"]

FORM = "sds-language/2 rationale?,action,params,reason_code,context_ref"
CHOICE_VALUES_MAX = 64
PARAMS_MAX = 16
TEXT_CHARS_MAX = 2000

_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_PARAM = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NUMBER_END = re.compile(rb"[,}]")
_TEXT_END = re.compile(rb'"')
_CONTEXT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChoiceView:
    """A choice in progress, or the next one when everything before it is forced.

    `start`: the offset at which it begins. `lead`: the forced bytes from the end of the prefix to `start`, empty once
    the choice has begun. `options`: (label, bytes from `start` through the forced bytes after the option), only those
    the prefix still permits, two at least; none of these is a prefix of another.
    """

    name: str
    start: int
    lead: bytes
    options: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Language:
    """All byte strings that spell a decision of `envelope` with this `context_ref`. Build one with `language()`."""

    root: tuple[Node, ...]
    envelope: DecisionEnvelope
    context_ref: str

    @property
    def hash(self) -> str:
        """SHA-256 of the form and the regular expression, 64 hexadecimal digits."""
        return hashlib.sha256(f"{FORM}\n{emit_regex.emit(self)}".encode()).hexdigest()

    def choices_at(self, prefix: bytes) -> ChoiceView | None:
        """Return the choice at or after `prefix`, or None where digits, text or nothing but forced bytes come next.

        A number of at most CHOICE_VALUES_MAX values is a choice between its literals; the digits of a longer one are
        passed over unread, so this does not prove that the prefix is in the language. Raises LanguageError when the
        forced bytes or the options of the prefix are not the language's.
        """
        nodes: Sequence[Node] = self.root
        at, lead = 0, b""
        while nodes:
            node, rest = nodes[0], nodes[1:]
            if isinstance(node, Literal):
                written = prefix[at : at + len(node.text)]
                if not node.text.startswith(written):
                    raise _not_ours(at)
                at, lead, nodes = at + len(node.text), node.text[len(written) :], rest
            elif (branches := _branches(node)) is not None:
                open_ = _open(branches, rest, prefix[at:])
                if len(open_) > 1:
                    return ChoiceView(node.name, at, lead, tuple((label, forced) for label, forced, _ in open_))
                if not open_:
                    raise _not_ours(at)
                nodes = open_[0][2]
            elif (end := _end(node, prefix, at)) is not None:
                at, nodes = end, rest
            else:
                return None
        if at < len(prefix):
            raise _not_ours(at)
        return None


def language(envelope: DecisionEnvelope, context_ref: str) -> Language:
    """Return the language of an envelope. Raises LanguageError when a name or a size is not the proposal form's."""
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
    kinds = [Option(kind.kind, _packed(_kind(kind))) for kind in envelope.kinds]
    _check_codes([option.label for option in kinds], "kind")
    return Language(_packed([*opening, *_choice("action", kinds), tail]), envelope, context_ref)


def _kind(kind: KindBound) -> Iterable[Node]:
    _check_codes(kind.reasons, "reason code")
    names = [name for name, _ in kind.params]
    if len(names) > PARAMS_MAX or len(set(names)) < len(names) or not all(map(_PARAM.fullmatch, names)):
        raise LanguageError(f"`{kind.kind}` has parameters the form cannot write", reason_code="LANGUAGE_INVALID")
    yield Literal(f'{kind.kind}","params":{{'.encode())
    for i, (name, allowed) in enumerate(kind.params):
        yield Literal(f'{"," if i else ""}"{name}":'.encode())
        yield _number(name, allowed)
    yield Literal(b'},"reason_code":"')
    yield from _choice("reason_code", [Option(code, (Literal(code.encode()),)) for code in kind.reasons])


def _number(name: str, allowed: Bound) -> Node:
    if allowed.lo == allowed.hi:
        return Literal(format_literal(allowed.lo, allowed.scale).encode())
    return Number(name, allowed)


def _choice(name: str, options: list[Option]) -> tuple[Node, ...]:
    return options[0].then if len(options) == 1 else (Choice(name, tuple(options)),)


def _check_codes(codes: Sequence[str], what: str) -> None:
    if not codes or len(set(codes)) < len(codes):
        raise LanguageError(f"a {what} is missing or stands twice", reason_code="LANGUAGE_INVALID")
    for code in codes:
        if not _CODE.fullmatch(code):
            raise LanguageError(f"`{code}` is not a {what} the form can write", reason_code="LANGUAGE_INVALID")


def _packed(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Join literals that stand side by side."""
    packed: list[Node] = []
    for node in nodes:
        if isinstance(node, Literal) and packed and isinstance(last := packed[-1], Literal):
            packed[-1] = Literal(last.text + node.text)
        else:
            packed.append(node)
    return tuple(packed)


def _branches(node: Node) -> tuple[Option, ...] | None:
    if isinstance(node, Choice):
        return node.options
    if isinstance(node, Number) and len(node.bound) <= CHOICE_VALUES_MAX:
        bound = node.bound
        literals = (format_literal(value, bound.scale) for value in range(bound.lo, bound.hi + 1, bound.step))
        return tuple(Option(text, (Literal(text.encode()),)) for text in literals)
    return None


def _open(
    branches: Iterable[Option], rest: Sequence[Node], written: bytes
) -> list[tuple[str, bytes, tuple[Node, ...]]]:
    """Return the options that can still be meant: label, forced bytes, and all that would follow."""
    found = []
    for option in branches:
        nodes = _packed([*option.then, *rest])
        forced = nodes[0].text if isinstance(nodes[0], Literal) else b""
        if forced.startswith(written) or written.startswith(forced):
            found.append((option.label, forced, nodes))
    return found


def _end(node: Node, prefix: bytes, at: int) -> int | None:
    """Return where a number or a text ends, or None while the prefix may go on with it."""
    found = (_NUMBER_END if isinstance(node, Number) else _TEXT_END).search(prefix, at)
    return found.start() if found else None


def _not_ours(at: int) -> LanguageError:
    return LanguageError(f"byte {at}: the prefix leaves the language", reason_code="LANGUAGE_LEFT")

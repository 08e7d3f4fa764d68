"""The shape of a decision language in one tokenizer, made once; what changes from packet to packet is data.

The shape: which kinds, reasons, parameters and scales there are, the signs a number may have, whether a rationale is
written. The bounds and the context reference are no part of it, so a new packet's language costs a look-up. The form
itself is `language()`'s: a plan is made from its nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sds.grammars.language import TEXT_CHARS_MAX, language
from sds.grammars.literals import DIGITS
from sds.grammars.nodes import Choice, Literal, Number, Text
from sds.grammars.nodes import Node as Part
from sds.grammars.tries import End, Fact, Node, NumberEnd, Path, TailEnd, TextEnd, Words, grow, spelled
from sds.grammars.walk import MASK_FAILED, Fork, Spelling, Walk
from sds.kernel.bounds import Bound
from sds.kernel.envelope import DecisionEnvelope, KindBound
from sds.kernel.errors import LanguageError

__all__ = ["MASK_FAILED", "Fork", "Planner", "Walk", "Words"]

PLANS_MAX = 64
PATHS_MAX = 1 << 14
CHUNK_DIGITS_MAX = 3
_HEX = "0123456789abcdef"
_NO_REF = "0" * 64
_TEXT_BYTES = frozenset(range(32, 127)) - frozenset(b'"\\')
# Numbers on which a tokenizer shows how it cuts digits.
_NUMBERS = ("1", "12", "123", "1234", "12345", "1234567", "1000", "2024", "99999999", "100000", "31415926535")

_SIGNS: dict[tuple[bool, bool], tuple[int, int]] = {
    (False, True): (0, 1),
    (True, False): (-2, -1),
    (True, True): (-1, 1),
}
_ParamShape = tuple[str, int, bool, bool]
_Shape = tuple[tuple[tuple[str, tuple[str, ...], tuple[_ParamShape, ...]], ...], bool]


class Planner:
    """The plans of one tokenizer, at most PLANS_MAX of them; for one thread."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._plans: OrderedDict[_Shape, Node] = OrderedDict()
        self._spelling: Spelling | None = None

    def walk(self, envelope: DecisionEnvelope, context_ref: str) -> Walk:
        """Return a walk through the envelope's language.

        Raises LanguageError where `language()` does, for a bound without a value, and where no tokens spell a decision.
        """
        if len(context_ref) != len(_NO_REF) or context_ref.strip(_HEX):
            language(envelope, context_ref)
            raise LanguageError("the context reference is not 64 hexadecimal digits", reason_code="LANGUAGE_INVALID")
        if not 0 <= envelope.rationale_chars_max <= TEXT_CHARS_MAX:
            language(envelope, context_ref)
            raise LanguageError("the rationale has no such length", reason_code="LANGUAGE_INVALID")
        shape: _Shape = (
            tuple([(kind.kind, kind.reasons, tuple([_param(*p) for p in kind.params])) for kind in envelope.kinds]),
            envelope.rationale_chars_max > 0,
        )
        root = self._plans.get(shape)
        if root is None:
            root = self._planned(shape, envelope)
        else:
            self._plans.move_to_end(shape)
        if self._spelling is None:
            self._spelling = Spelling(self._words, _digits(self._words), _text_tokens)
        return Walk(self._spelling, root, envelope, context_ref)

    def _planned(self, shape: _Shape, envelope: DecisionEnvelope) -> Node:
        language(envelope, _NO_REF)  # names, sizes and codes are the form's
        root = self._plans[shape] = _Planning(self._words, shape).root
        if len(self._plans) > PLANS_MAX:
            self._plans.popitem(last=False)
        return root


def _param(name: str, allowed: Bound) -> _ParamShape:
    """Return name, scale, and whether there are values below zero, and others."""
    lo, hi, step = allowed.lo, allowed.hi, allowed.step
    lo += (allowed.residue - lo) % step
    if lo > hi:
        raise LanguageError(f"`{name}` has a bound that holds no value", reason_code="LANGUAGE_INVALID")
    return name, allowed.scale, lo < 0, hi - (hi - allowed.residue) % step >= 0


class _Planning:
    """One plan in the making, from the language of an envelope that has the shape and bounds of no importance."""

    def __init__(self, words: Words, shape: _Shape) -> None:
        self._words = words
        kinds, rationale = shape
        self._bounds = [[_some_bound(param) for param in params] for _, _, params in kinds]
        bounds = [
            tuple((param[0], allowed) for param, allowed in zip(params, chosen, strict=True))
            for (_, _, params), chosen in zip(kinds, self._bounds, strict=True)
        ]
        envelope = DecisionEnvelope(
            tuple(KindBound(kind, reasons, params) for (kind, reasons, _), params in zip(kinds, bounds, strict=True)),
            int(rationale),
        )
        self._kinds = {kind.kind: i for i, kind in enumerate(envelope.kinds)}
        self._only = envelope.kinds[0].kind
        self._envelope = envelope
        self._count = 0
        self.root = self._segment(language(envelope, _NO_REF).root, self._only, b"")

    def _segment(self, parts: Sequence[Part], kind: str, before: bytes) -> Node:
        """Return the trie of all that can follow up to the next number or text; `kind`: the one chosen before."""
        root = Node()
        grow(root, [path for way in self._ways(parts, b"", (), kind) for path in self._paths(way, before)])
        return root

    def _ways(
        self, parts: Sequence[Part], text: bytes, facts: tuple[Fact, ...], kind: str
    ) -> Iterator[tuple[bytes, tuple[Fact, ...], str, Sequence[Part]]]:
        """Yield every way: its text, the options it takes, its kind, and what follows from the number or text on."""
        for i, part in enumerate(parts):
            if isinstance(part, Literal):
                text += part.text
            elif isinstance(part, Choice):
                for option in part.options:
                    fact = Fact(part.name, option.label, len(text), len(text) + len(option.label))
                    chosen = option.label if part.name == "action" else kind
                    yield from self._ways([*option.then, *parts[i + 1 :]], text, (*facts, fact), chosen)
                return
            else:
                yield text, facts, kind, parts[i:]
                return
        yield text, facts, kind, ()

    def _paths(self, way: tuple[bytes, tuple[Fact, ...], str, Sequence[Part]], before: bytes) -> Iterator[Path]:
        self._count += 1
        if self._count > PATHS_MAX:
            raise LanguageError(f"the language has more than {PATHS_MAX} ways through it")
        text, facts, kind, parts = way
        first = parts[0] if parts else None
        if isinstance(first, Number):
            for negative, then in self._signed(first, kind, parts):
                end = NumberEnd(
                    *self._place(kind, first.name), first.name, negative, len(_signs(first)), len(text), then
                )
                yield self._path(text + b"-" * negative, facts, end, before, b"1")
        elif isinstance(first, Text):
            then = self._segment(parts[1:], kind, b"a")
            yield self._path(text, facts, TextEnd(first.name, then), before, b"a")
        else:
            yield self._path(text.removesuffix(f'{_NO_REF}"}}'.encode()), facts, TailEnd(), before, b"0")

    def _signed(self, number: Number, kind: str, parts: Sequence[Part]) -> Iterator[tuple[bool, Node]]:
        then = self._segment(parts[1:], kind, b"0")
        for negative in _signs(number):
            yield negative, then

    def _place(self, kind: str, name: str) -> tuple[int, int]:
        at = self._kinds[kind]
        return at, [param for param, _ in self._envelope.kinds[at].params].index(name)

    def _path(self, text: bytes, facts: tuple[Fact, ...], end: End, before: bytes, after: bytes) -> Path:
        tokens = spelled(self._words, text, before=before, after=after)
        return Path(tokens, tuple(map(self._words.piece, tokens)), facts, end)


def _some_bound(param: _ParamShape) -> Bound:
    _, scale, below, above = param
    return Bound(*_SIGNS[below, above], 1, 0, scale)


def _signs(number: Number) -> tuple[bool, ...]:
    return tuple(negative for negative, there in ((False, number.bound.hi >= 0), (True, number.bound.lo < 0)) if there)


def _digits(words: Words) -> dict[str, int]:
    """Return the token of every run of digits that may be written at once, and of the point.

    A tokenizer that cuts digits in threes, or one by one, from the left is followed. With any other, digits are written
    one by one: exact, though not as the tokenizer would.
    """
    size = next((size for size in range(CHUNK_DIGITS_MAX, 1, -1) if _cuts(words, size)), 1)
    runs = [f"{n:0{width}}" for width in range(1, size + 1) for n in range(10**width)]
    return {run: _one_token(words, run) for run in (*runs, ".")}


def _cuts(words: Words, size: int) -> bool:
    """Tell whether digits are cut into runs of `size` from the left."""
    for number in _NUMBERS:
        pieces = [words.piece(token) for token in words.tokenize(number.encode(), special=False)]
        if pieces != [number[at : at + size].encode() for at in range(0, len(number), size)]:
            return False
    return all(len(words.tokenize(f"{n:0{size}}".encode(), special=False)) == 1 for n in range(10**size))


def _one_token(words: Words, text: str) -> int:
    tokens = spelled(words, text.encode())
    if len(tokens) > 1:
        raise LanguageError(f"no token of the model spells `{text}`", reason_code="LANGUAGE_UNSPEAKABLE")
    return tokens[0]


def _text_tokens(words: Words) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the tokens of free text, the shortest first, and their lengths in characters."""
    pieces = (words.piece(token) for token in range(words.vocab_size))
    sizes = [len(piece) if _TEXT_BYTES.issuperset(piece) else 0 for piece in pieces]
    lengths = np.array(sizes, dtype=np.intp)
    order = np.argsort(lengths, kind="stable")
    order = order[np.searchsorted(lengths[order], 1) :]
    return order, lengths[order]

"""The shape of a decision language in one tokenizer, made once; what changes from packet to packet is data.

The shape: which kinds, reasons, parameters and scales there are, the signs a number may have, whether a rationale is
written. The bounds and the context reference are no part of it, so a new packet's language costs a look-up. The form
itself is `language()`'s: a plan is made from its nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sds.grammars.language import TEXT_CHARS_MAX, language
from sds.grammars.nodes import Choice, Literal, Number, Text
from sds.grammars.nodes import Node as Part
from sds.grammars.tokens.matcher import MASK_FAILED, ChoicePoint, TokenMatcher
from sds.grammars.tokens.tokenizer import LANGUAGE_UNSPEAKABLE, Tokenizer, TokenizerIndex
from sds.grammars.tokens.trie import End, Node, NumberSlot, OptionMark, Path, Suffix, TextEnd, grow
from sds.kernel.envelope.bounds import Bound
from sds.kernel.envelope.envelope import DecisionEnvelope, KindBound
from sds.kernel.errors import LanguageError

__all__ = ["MASK_FAILED", "ChoicePoint", "GrammarCompiler", "TokenMatcher", "Tokenizer"]

PLANS_MAX = 64
PATHS_MAX = 1 << 14
_HEX = "0123456789abcdef"
_NO_REF = "0" * 64

_SIGNS: dict[tuple[bool, bool], tuple[int, int]] = {
    (False, True): (0, 1),
    (True, False): (-2, -1),
    (True, True): (-1, 1),
}
_ParamShape = tuple[str, int, bool, bool]
_Shape = tuple[tuple[tuple[str, tuple[str, ...], tuple[_ParamShape, ...]], ...], bool]
_Way = tuple[bytes, tuple[OptionMark, ...], str, Sequence[Part]]


class GrammarCompiler:
    """The plans of one tokenizer, at most PLANS_MAX of them; for one thread."""

    def __init__(self, words: Tokenizer) -> None:
        self.spelling = TokenizerIndex(words)
        self._plans: OrderedDict[_Shape, Node] = OrderedDict()

    def walk(self, envelope: DecisionEnvelope, context_ref: str) -> TokenMatcher:
        """Return a walk through the envelope's language.

        Raises LanguageError where `language()` does, for a bound without a value, and where no tokens spell a decision.
        """
        well_formed = len(context_ref) == len(_NO_REF) and not context_ref.strip(_HEX)
        if not (well_formed and 0 <= envelope.rationale_chars_max <= TEXT_CHARS_MAX):
            language(envelope, context_ref)  # raises, and says why
            raise LanguageError("the form cannot write this envelope", reason_code="LANGUAGE_INVALID")
        shape: _Shape = (
            tuple([(kind.kind, kind.reasons, tuple([_param(*p) for p in kind.params])) for kind in envelope.kinds]),
            envelope.rationale_chars_max > 0,
        )
        root = self._plans.get(shape)
        if root is None:
            root = self._planned(shape, envelope)
        else:
            self._plans.move_to_end(shape)
        return TokenMatcher(self.spelling, root, envelope, context_ref)

    def _planned(self, shape: _Shape, envelope: DecisionEnvelope) -> Node:
        language(envelope, _NO_REF)  # names, sizes and codes are the form's
        root = self._plans[shape] = _Planning(self.spelling, shape).root
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

    def __init__(self, spelling: TokenizerIndex, shape: _Shape) -> None:
        kinds, rationale = shape
        bare = (KindBound(kind, reasons, tuple(map(_some_bound, params))) for kind, reasons, params in kinds)
        self._envelope = DecisionEnvelope(tuple(bare), int(rationale))
        self._spelling = spelling
        self._count = 0
        only = self._envelope.kinds[0].kind  # where there are several, the one chosen takes its place
        self.root = self._segment(language(self._envelope, _NO_REF).root, only, b"")

    def _segment(self, parts: Sequence[Part], kind: str, before: bytes) -> Node:
        """Return the trie of all that can follow up to the next number or text; `kind`: the one chosen before."""
        root = Node()
        grow(root, [path for way in self._ways(parts, b"", (), kind) for path in self._paths(way, before)])
        return root

    def _ways(self, parts: Sequence[Part], text: bytes, facts: tuple[OptionMark, ...], kind: str) -> Iterator[_Way]:
        """Yield every way: its text, the options it takes, its kind, and what follows from the number or text on."""
        for i, part in enumerate(parts):
            if isinstance(part, Literal):
                text += part.text
            elif isinstance(part, Choice):
                for option in part.options:
                    fact = OptionMark(part.name, option.label, len(text), len(text) + len(option.label))
                    chosen = option.label if part.name == "action" else kind
                    yield from self._ways([*option.then, *parts[i + 1 :]], text, (*facts, fact), chosen)
                return
            else:
                yield text, facts, kind, parts[i:]
                return
        yield text, facts, kind, ()

    def _paths(self, way: _Way, before: bytes) -> Iterator[Path]:
        self._count += 1
        if self._count > PATHS_MAX:
            raise LanguageError(f"the language has more than {PATHS_MAX} ways through it")
        text, facts, kind, parts = way
        first = parts[0] if parts else None
        if isinstance(first, Number):
            kind_at, param_at = self._place(kind, first.name)
            then = self._closing(first, parts[1:], kind, b"0")
            for negative in _signs(first):
                end = NumberSlot(kind_at, param_at, first.name, negative, len(text), then)
                yield self._path(text + b"-" * negative, facts, end, before, b"1")
        elif isinstance(first, Text):
            then = self._closing(first, parts[1:], kind, b"a")
            yield self._path(text, facts, TextEnd(first.name, then), before, b"a")
        else:
            yield self._path(text.removesuffix(f'{_NO_REF}"}}'.encode()), facts, Suffix(), before, b"0")

    def _closing(self, part: Number | Text, parts: Sequence[Part], kind: str, before: bytes) -> Node:
        """Return the trie of what follows a number or text. What ends it makes no choice: that would be made unseen."""
        then = self._segment(parts, kind, before)
        if then.parting is not None:
            raise LanguageError(
                f"the token that ends `{part.name}` would make the choice behind it", reason_code=LANGUAGE_UNSPEAKABLE
            )
        return then

    def _place(self, kind: str, name: str) -> tuple[int, int]:
        at = self._envelope.names.index(kind)
        return at, [param for param, _ in self._envelope.kinds[at].params].index(name)

    def _path(self, text: bytes, facts: tuple[OptionMark, ...], end: End, before: bytes, after: bytes) -> Path:
        tokens = self._spelling.fixed(text, before=before, after=after)
        return Path(tokens, tuple(map(self._spelling.piece, tokens)), facts, end)


def _some_bound(param: _ParamShape) -> tuple[str, Bound]:
    name, scale, below, above = param
    return name, Bound(*_SIGNS[below, above], 1, 0, scale)


def _signs(number: Number) -> tuple[bool, ...]:
    return tuple(negative for negative, there in ((False, number.bound.hi >= 0), (True, number.bound.lo < 0)) if there)

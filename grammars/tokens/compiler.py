"""Compiles the shape of a decision language for one tokenizer, once. What changes from packet to packet is data.

The shape is: the kinds, reasons, parameters and scales, the possible signs of each number, and whether a rationale is
written. Bounds and the context reference are no part of it, so the matcher of a new packet costs a look-up. A grammar
is compiled from the nodes of `language()`, which defines the form.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sds.grammars.language import TEXT_CHARS_MAX, Choice, Literal, Node, Number, Text, language
from sds.grammars.tokens.matcher import TokenMatcher
from sds.grammars.tokens.tokenizer import LANGUAGE_UNSPEAKABLE, Tokenizer, TokenizerIndex
from sds.grammars.tokens.trie import End, NumberSlot, OptionMark, Path, Suffix, TextEnd, TrieNode, insert
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound
from sds.kernel.errors import LanguageError

GRAMMARS_MAX = 64
PATHS_MAX = 1 << 14
_HEX = "0123456789abcdef"
_NO_REF = "0" * 64

# By whether there are values below zero, and others: the ends of such a bound.
_SIGNS: dict[tuple[bool, bool], tuple[int, int]] = {
    (False, True): (0, 1),
    (True, False): (-2, -1),
    (True, True): (-1, 1),
}
_ParamShape = tuple[str, int, bool, bool]
_Shape = tuple[tuple[tuple[str, tuple[str, ...], tuple[_ParamShape, ...]], ...], bool]
_Unspelled = tuple[bytes, tuple[OptionMark, ...], str, Sequence[Node]]


class GrammarCompiler:
    """The compiled grammars of one tokenizer; it keeps the GRAMMARS_MAX used last. For one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer_index = TokenizerIndex(tokenizer)
        self._grammars: OrderedDict[_Shape, TrieNode] = OrderedDict()

    def matcher(self, envelope: DecisionEnvelope, context_ref: str) -> TokenMatcher:
        """Return a matcher at the start of the envelope's language.

        Raises LanguageError where `language()` does, for a bound without a value, and where no tokens spell a decision.
        """
        well_formed = len(context_ref) == len(_NO_REF) and not context_ref.strip(_HEX)
        if not (well_formed and 0 <= envelope.rationale_chars_max <= TEXT_CHARS_MAX):
            language(envelope, context_ref)  # raises with the reason
            raise LanguageError("a proposal cannot hold this envelope's decisions", reason_code="LANGUAGE_INVALID")
        shape: _Shape = (
            tuple([(kind.kind, kind.reasons, tuple([_param(*p) for p in kind.params])) for kind in envelope.kinds]),
            envelope.rationale_chars_max > 0,
        )
        root = self._grammars.get(shape)
        if root is None:
            root = self._compile(shape, envelope)
        else:
            self._grammars.move_to_end(shape)
        return TokenMatcher(self.tokenizer_index, root, envelope, context_ref)

    def _compile(self, shape: _Shape, envelope: DecisionEnvelope) -> TrieNode:
        language(envelope, _NO_REF)  # raises unless the form can write names, sizes and codes
        root = self._grammars[shape] = _Compilation(self.tokenizer_index, shape).root
        if len(self._grammars) > GRAMMARS_MAX:
            self._grammars.popitem(last=False)
        return root


def _param(name: str, allowed: Bound) -> _ParamShape:
    """Return name, scale, and whether there are values below zero, and others."""
    lo, hi, step = allowed.lo, allowed.hi, allowed.step
    lo += (allowed.residue - lo) % step
    if lo > hi:
        raise LanguageError(f"`{name}` has bounds that contain no value", reason_code="LANGUAGE_INVALID")
    return name, allowed.scale, lo < 0, hi - (hi - allowed.residue) % step >= 0


class _Compilation:
    """One grammar being compiled, from the language of any envelope of that shape; the bounds do not matter."""

    def __init__(self, index: TokenizerIndex, shape: _Shape) -> None:
        kinds, rationale = shape
        bare = (KindBound(kind, reasons, tuple(map(_some_bound, params))) for kind, reasons, params in kinds)
        self._envelope = DecisionEnvelope(tuple(bare), int(rationale))
        self._index = index
        self._count = 0
        only = self._envelope.kinds[0].kind  # with several kinds, the option that a path takes replaces it
        self.root = self._segment(language(self._envelope, _NO_REF).root, only, b"")

    def _segment(self, nodes: Sequence[Node], kind: str, before: bytes) -> TrieNode:
        """Return the trie of all that can follow up to the next number or text. `kind`: the kind chosen before."""
        root = TrieNode()
        insert(root, [path for each in self._unspelled(nodes, b"", (), kind) for path in self._paths(each, before)])
        return root

    def _unspelled(
        self, nodes: Sequence[Node], text: bytes, marks: tuple[OptionMark, ...], kind: str
    ) -> Iterator[_Unspelled]:
        """Yield for every path its text, the options it takes, its kind, and the nodes from the number or text on."""
        for i, node in enumerate(nodes):
            if isinstance(node, Literal):
                text += node.text
            elif isinstance(node, Choice):
                for option in node.options:
                    mark = OptionMark(node.name, option.label, len(text), len(text) + len(option.label))
                    chosen = option.label if node.name == "action" else kind
                    yield from self._unspelled([*option.then, *nodes[i + 1 :]], text, (*marks, mark), chosen)
                return
            else:
                yield text, marks, kind, nodes[i:]
                return
        yield text, marks, kind, ()

    def _paths(self, unspelled: _Unspelled, before: bytes) -> Iterator[Path]:
        self._count += 1
        if self._count > PATHS_MAX:
            raise LanguageError(f"the language has more than {PATHS_MAX} paths")
        text, marks, kind, nodes = unspelled
        first = nodes[0] if nodes else None
        if isinstance(first, Number):
            kind_at, param_at = self._indices(kind, first.name)
            then = self._trie_after(first, nodes[1:], kind, b"0")
            for negative in _signs(first):
                end = NumberSlot(kind_at, param_at, first.name, negative, len(text), then)
                yield self._path(text + b"-" * negative, marks, end, before, b"1")
        elif isinstance(first, Text):
            then = self._trie_after(first, nodes[1:], kind, b"a")
            yield self._path(text, marks, TextEnd(first.name, then), before, b"a")
        else:
            yield self._path(text.removesuffix(f'{_NO_REF}"}}'.encode()), marks, Suffix(), before, b"0")

    def _trie_after(self, node: Number | Text, nodes: Sequence[Node], kind: str, before: bytes) -> TrieNode:
        """Return the trie of what follows a number or text. Raises LanguageError where the token that ends it would
        also decide a choice behind it: that choice would have no probability of its own.
        """
        then = self._segment(nodes, kind, before)
        if then.branch is not None:
            raise LanguageError(
                f"the token that ends `{node.name}` would also decide what follows", reason_code=LANGUAGE_UNSPEAKABLE
            )
        return then

    def _indices(self, kind: str, name: str) -> tuple[int, int]:
        at = self._envelope.names.index(kind)
        return at, [param for param, _ in self._envelope.kinds[at].params].index(name)

    def _path(self, text: bytes, marks: tuple[OptionMark, ...], end: End, before: bytes, after: bytes) -> Path:
        tokens = self._index.fixed(text, before=before, after=after)
        return Path(tokens, tuple(map(self._index.piece, tokens)), marks, end)


def _some_bound(param: _ParamShape) -> tuple[str, Bound]:
    name, scale, below, above = param
    return name, Bound(*_SIGNS[below, above], 1, 0, scale)


def _signs(number: Number) -> tuple[bool, ...]:
    return tuple(negative for negative, there in ((False, number.bound.hi >= 0), (True, number.bound.lo < 0)) if there)

"""One decision being written: what is forced, where tokens part, and what each of them leaves open.

It knows tokens and bytes, and nothing of a model. A token outside `fork().tokens` is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sds.grammars.language import CHOICE_VALUES_MAX
from sds.grammars.literals import START, Literals, Written, every_literal
from sds.grammars.tries import Node, NumberEnd, Path, TextEnd, Words, spelled
from sds.kernel.envelope import Bound, DecisionEnvelope
from sds.kernel.errors import LanguageError

MASK_FAILED = "MASK_FAILED"
_TextTokens = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(frozen=True, slots=True)
class Fork:
    """A place where more than one token may come next.

    `choice`: "action", "reason_code", "rationale", or the name of a parameter. `tokens`: those permitted, two at least.
    `labels`: for each token the options it leaves open, whole labels where the choice is `finite`; of a wider number the
    characters that come next (`""`: it ends here); of text none. `start`: the offset at which the choice began.
    """

    choice: str
    tokens: NDArray[np.intp]
    labels: tuple[tuple[str, ...], ...]
    start: int
    finite: bool


class Spelling:
    """What every walk with one tokenizer shares: how digits are spelled, and which tokens are text (made when needed)."""

    def __init__(self, words: Words, digits: dict[str, int], text_tokens: Callable[[Words], _TextTokens]) -> None:
        self.words = words
        self.digits = digits
        self.runs = {token: run for run, token in digits.items()}
        self.chunk = max(map(len, digits))
        self._text_tokens = text_tokens
        self._text: _TextTokens | None = None
        self._lengths: NDArray[np.intp] | None = None

    def text(self) -> _TextTokens:
        if self._text is None:
            self._text = self._text_tokens(self.words)
            self._lengths = np.zeros(self.words.vocab_size, dtype=np.intp)
            self._lengths[self._text[0]] = self._text[1]
        return self._text

    def chars(self, token: int) -> int:
        """Return how many characters of text a token is, 0 for one that is none."""
        self.text()
        lengths = self._lengths
        return int(lengths[token]) if lengths is not None and 0 <= token < len(lengths) else 0

    def number(self, unsigned: str) -> Iterator[int]:
        """Yield the tokens of a literal without its sign."""
        for i, part in enumerate(unsigned.split(".")):
            if i:
                yield self.digits["."]
            for at in range(0, len(part), self.chunk):
                yield self.digits[part[at : at + self.chunk]]


@dataclass(slots=True, eq=False)
class _Writing:
    """A number being written. `text`: its characters so far, the sign among them. `start`: its offset."""

    end: NumberEnd
    literals: Literals
    every: tuple[str, ...]  # all its literals, of both signs; none where there are too many
    start: int
    text: str
    written: Written = START

    def labels(self, run: str, chunk: int) -> tuple[str, ...]:
        """Return what stays open after `run`, which is followed by no digit where it is shorter than a chunk."""
        if not self.every:
            return (run,)
        text, short = self.text + run, run.isdigit() and len(run) < chunk
        return tuple(
            each for each in self.every if each.startswith(text) and not (short and each[len(text) :][:1].isdigit())
        )


class Walk:
    """One walk through one language. `data` is written so far, as `tokens`; begin with `forced()`. `plan`: SHA-256 of its plan.

    Every method raises LanguageError (MASK_FAILED) where the language is left or nothing can follow.
    """

    def __init__(self, spelling: Spelling, root: Node, envelope: DecisionEnvelope, context_ref: str) -> None:
        self.data = b""
        self.tokens: list[int] = []
        self.finished = False
        self.plan = root.digest()
        self._spelling, self._envelope, self._context_ref = spelling, envelope, context_ref
        self._node = root
        self._base = 0  # the offset at which the trie's paths begin
        self._number: _Writing | None = None
        self._text: TextEnd | None = None
        self._text_start = 0
        self._runs: dict[int, tuple[str, Written | None]] | None = None

    def forced(self) -> list[int]:
        """Take everything that is forced now, and return these tokens."""
        begun = len(self.tokens)
        while not self.finished:
            if self._number is None and self._text is None and (run := self._node.run) is not None:
                tokens, data, self._node = run
                self.tokens += tokens
                self.data += data
                self._enter()
            elif (token := self._only()) is not None:
                self.take(token)
            else:
                break
        return self.tokens[begun:]

    def _only(self) -> int | None:
        if self._text is not None:
            closers = self._text.then.children
            return next(iter(closers)) if len(closers) == 1 and not len(self._text_open()) else None
        runs = self._open_runs()
        if len(runs) == 1 and not (self._number is None and self._node.children):
            return next(iter(runs))
        if not runs and self._number is not None:
            raise LanguageError("no digit can follow", reason_code=MASK_FAILED)
        return None

    def fork(self) -> Fork:
        """Return what may come next; for after `forced()`, unless all is written."""
        if self.finished:
            raise LanguageError("the decision is finished", reason_code=MASK_FAILED)
        if self._text is not None:
            tokens = np.concatenate([np.array(list(self._text.then.children), dtype=np.intp), self._text_open()])
            return Fork(self._text.name, tokens, (), self._text_start, finite=False)
        if self._number is not None or self._node.fact is None:
            return self._number_fork()
        node, at = self._node, self._node.fact
        fact = node.paths[0].facts[at]
        labels = tuple(
            tuple(dict.fromkeys(path.facts[at].label for path in child.paths)) for child in node.children.values()
        )
        tokens = np.fromiter(node.children, dtype=np.intp, count=len(node.children))
        return Fork(fact.choice, tokens, labels, self._base + fact.start, finite=True)

    def take(self, token: int) -> None:
        """Write a token that may come next, forced or not."""
        if self.finished:
            raise LanguageError("the decision is finished", reason_code=MASK_FAILED)
        if self._text is not None:
            self._take_text(self._text, token)
            return
        found = self._open_runs().get(token)
        if found is not None:
            self._take_run(token, *found)
        elif self._number is None:
            self._step(self._node, token)
        else:
            raise _refused()

    def copy(self) -> Walk:
        """Return another walk at the same place: to see what a choice would force, without making it."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        other._number = copy.copy(self._number)  # noqa: SLF001 - our own
        return other

    def alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (label, all tokens from here through the one that completes the option), none a prefix of another;
        for a finite choice of which nothing is decided yet, else nothing."""
        if self.finished or self._text is not None:
            return ()
        if self._number is not None or self._node.fact is None:
            return self._number_alternatives()
        if not self._node.first:
            return ()
        node, at = self._node, self._node.fact
        found = ((path.facts[at].label, path.tokens[node.depth : path.closes(at)]) for path in node.paths)
        return tuple(dict.fromkeys(found))

    # Tries

    def _step(self, node: Node, token: int) -> None:
        child = node.children.get(token)
        if child is None:
            raise _refused()
        self._node = child
        self.tokens.append(token)
        self.data += child.piece
        self._enter()

    def _enter(self) -> None:
        """Go on to what begins where a path ends. Where a sign may still be written, the trie is not left yet."""
        self._runs = None
        end = self._node.end
        if end is None or self._node.children:
            return
        if isinstance(end, NumberEnd):
            self._number = self._writing(end)
        elif isinstance(end, TextEnd):
            self._text, self._text_start = end, len(self.data)
        else:
            self._finish()

    def _finish(self) -> None:
        rest = f'{self._context_ref}"}}'.encode()
        tokens = spelled(self._spelling.words, rest, before=b'","context_ref":"')
        self.tokens += tokens
        self.data += rest
        self.finished = True

    # Text

    def _text_open(self) -> NDArray[np.intp]:
        tokens, lengths = self._spelling.text()
        left = self._text_start + self._envelope.rationale_chars_max - len(self.data)
        return tokens[: np.searchsorted(lengths, left, side="right")]

    def _take_text(self, text: TextEnd, token: int) -> None:
        if token in text.then.children:
            self._text, self._base = None, len(self.data)
            self._step(text.then, token)
            return
        left = self._text_start + self._envelope.rationale_chars_max - len(self.data)
        if not 0 < self._spelling.chars(token) <= left:
            raise _refused()
        self.tokens.append(token)
        self.data += self._spelling.words.piece(token)

    # Numbers

    def _writing(self, end: NumberEnd) -> _Writing:
        allowed, every = self._bound(end)
        start = len(self.data) - end.negative
        return _Writing(end, Literals(allowed, negative=end.negative), every, start, "-" * end.negative)

    def _here(self) -> _Writing | None:
        """Return the number that is being written, or could be from here without a sign."""
        if self._number is None and isinstance(self._node.end, NumberEnd):
            return self._writing(self._node.end)
        return self._number

    def _open_runs(self) -> dict[int, tuple[str, Written | None]]:
        """Return the tokens that go on with a number, or end it (None): what they write of it, what then stands."""
        if self._runs is None:
            self._runs = {}
            number = self._here()
            if number is not None:
                self._runs = dict(self._number_runs(number))
        return self._runs

    def _number_runs(self, number: _Writing) -> Iterator[tuple[int, tuple[str, Written | None]]]:
        digits = self._spelling.digits
        for run, after in number.literals.chunks(number.written, self._spelling.chunk):
            yield digits[run], (run, after)
        pointed = number.literals.after(number.written, ".")
        if pointed is not None:
            yield digits["."], (".", pointed)
        if number.literals.ends(number.written):
            for token in number.end.then.children:
                yield token, ("", None)

    def _take_run(self, token: int, run: str, after: Written | None) -> None:
        number = self._here()
        if number is None:
            raise _refused()
        self._runs = None
        if after is None:
            self._number, self._base = None, len(self.data)
            self._step(number.end.then, token)
            return
        number.text += run
        number.written = after
        self._number = number
        self.tokens.append(token)
        self.data += run.encode()

    def _number_fork(self) -> Fork:
        number, chunk = self._here(), self._spelling.chunk
        tokens, labels = list[int](), list[tuple[str, ...]]()
        if number is not None:
            for token, (run, after) in self._open_runs().items():
                tokens.append(token)
                labels.append((number.text if number.every else "",) if after is None else number.labels(run, chunk))
        if self._number is not None:
            return Fork(number.end.name, _ids(tokens), tuple(labels), number.start, finite=bool(number.every))
        end = _number_of(self._node.paths[0])
        allowed, every = self._bound(end)
        for token, child in self._node.children.items():
            tokens.append(token)
            labels.append(_signed(allowed, every, {_number_of(path).negative for path in child.paths}))
        return Fork(end.name, _ids(tokens), tuple(labels), self._base + end.start, finite=bool(every))

    def _number_alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if self._number is not None:
            text, every, ways = self._number.text, self._number.every, [((), self._number.end)]
        else:
            ways = [(path.tokens[self._node.depth :], _number_of(path)) for path in self._node.paths]
            text, (_, every) = "", self._bound(ways[0][1])
        if not all(each.startswith(text) for each in every):
            return ()
        found = list[tuple[str, tuple[int, ...]]]()
        for each in every:
            lead, end = next(way for way in ways if way[1].negative == each.startswith("-"))
            tokens = (*lead, *self._spelling.number(each[max(len(text), end.negative) :]))
            closed = [()] if "." in each else [(token,) for token in end.then.children]
            found += [(each, tokens + close) for close in closed]
        return tuple(found)

    def _bound(self, end: NumberEnd) -> tuple[Bound, tuple[str, ...]]:
        """Return a number's bound, and its literals where they are few."""
        _, allowed = self._envelope.kinds[end.kind].params[end.param]
        return allowed, every_literal(allowed) if len(allowed) <= CHOICE_VALUES_MAX else ()


def _signed(allowed: Bound, every: tuple[str, ...], signs: set[bool]) -> tuple[str, ...]:
    """Return what a token leaves open that settles no more than the sign: the literals, or the first characters."""
    if every:
        return tuple(each for each in every if each.startswith("-") in signs)
    digits = (run for run, _ in Literals(allowed, negative=False).chunks(START, 1)) if False in signs else ()
    return (*digits, *("-" for sign in signs if sign))


def _number_of(path: Path) -> NumberEnd:
    if not isinstance(path.end, NumberEnd):
        raise LanguageError("the walk is at no number", reason_code=MASK_FAILED)
    return path.end


def _ids(tokens: list[int]) -> NDArray[np.intp]:
    return np.array(tokens, dtype=np.intp)


def _refused() -> LanguageError:
    return LanguageError("the language does not permit this token", reason_code=MASK_FAILED)

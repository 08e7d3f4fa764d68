"""One decision being written: what is forced, where tokens part, and what each of them leaves open.

It knows tokens and bytes, and nothing of a model. A token outside `fork().tokens` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sds.grammars.language import CHOICE_VALUES_MAX
from sds.grammars.tokens.digits import START, DigitMatcher, DigitPrefix, every_literal
from sds.grammars.tokens.tokenizer import TokenizerIndex
from sds.grammars.tokens.trie import Node, NumberSlot, Path, TextEnd
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope
from sds.kernel.errors import LanguageError

MASK_FAILED = "MASK_FAILED"
LEADING_BYTES_MAX = 32  # of a text, of which only the first token is wanted
_BEFORE_REF = b'","context_ref":"'
_DIGITS = re.compile(r"[0-9]*\.?[0-9]+")


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """A place where more than one token may come next.

    `choice`: "action", "reason_code", "rationale", or the name of a parameter. `tokens`: those permitted, two at least.
    `labels`: for each token the options it leaves open, whole labels where the choice is `finite`; of a wider number the
    characters that come next (`""`: it ends here); of text none. `start`: the offset at which the choice begins; the
    token of a sign may begin before it.
    """

    choice: str
    tokens: NDArray[np.intp]
    labels: tuple[tuple[str, ...], ...]
    start: int
    finite: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    """A number being written. `text`: its characters so far, the sign among them. `start`: its offset."""

    end: NumberSlot
    literals: DigitMatcher
    every: tuple[str, ...]  # all its literals, of both signs; none where there are too many
    start: int
    text: str
    written: DigitPrefix = START

    def labels(self, run: str, after: DigitPrefix | None) -> tuple[str, ...]:
        """Return what stays open after `run`; `after` is what then stands, None where the number has ended."""
        if not self.every:
            return (run,)
        if after is None:
            return (self.text,)
        text = self.text + run
        begun = (each for each in self.every if each.startswith(text))
        return tuple(each for each in begun if not (after.closed and each[len(text) :][:1].isdigit()))


class TokenMatcher:
    """One walk through one language. `data` is written so far, as `tokens`; begin with `forced()`. `plan`: SHA-256 of its plan.

    What ends a decision is of no choice: no model reads it, and it is spelled when it is asked for.

    Every method raises LanguageError (MASK_FAILED) where the language is left or nothing can follow, and whatever the
    words raise.
    """

    def __init__(self, spelling: TokenizerIndex, root: Node, envelope: DecisionEnvelope, context_ref: str) -> None:
        self.data = b""
        self._written: list[int] = []
        self.finished = False
        self.plan = root.digest()
        self._spelling, self._envelope, self._context_ref = spelling, envelope, context_ref
        self._unspelled = b""
        self._node = root
        self._base = 0  # the offset at which the trie's paths begin
        self._number: _Writing | None = None
        self._text: TextEnd | None = None
        self._text_start = 0
        self._runs: dict[int, tuple[str, DigitPrefix | None]] | None = None

    @property
    def tokens(self) -> list[int]:
        if self._unspelled:
            self._written += self._spelling.fixed(self._unspelled, before=_BEFORE_REF)
            self._unspelled = b""
        return self._written

    def canonical(self) -> bool:
        """Return whether the tokens are those that the tokenizer makes of `data`; what ends it is then spelled as there."""
        every = self._spelling.words.tokenize(self.data, special=False)
        if self._unspelled and every[: len(self._written)] == self._written:
            self._written, self._unspelled = every, b""
        return every == self.tokens

    def copy(self) -> TokenMatcher:
        """Return a walk of its own that has written the same."""
        copied = copy(self)
        self._written = self._written.copy()  # the copy keeps the list they shared
        return copied

    def forced(self) -> list[int]:
        """Take everything that is forced now, and return these tokens; not those of what ends the decision."""
        begun = len(self._written)
        while not self.finished:
            if self._number is None and self._text is None and (run := self._node.run) is not None:
                tokens, data, self._node = run
                self._written += tokens
                self.data += data
                self._enter()
            elif (token := self.only()) is not None:
                self.take(token)
            else:
                break
        return self._written[begun:]

    def only(self) -> int | None:
        """Return the one token that is forced now, None where there are several."""
        if self._text is not None:
            tokens = self._text_tokens(self._text)
            return int(tokens[0]) if len(tokens) == 1 else None
        if self._number is None:  # where there is no run, tokens part, were it only over a sign
            return self._node.run[0][0] if self._node.run else None
        runs = self._open_runs()
        if not runs:
            raise LanguageError("no digit can follow", reason_code=MASK_FAILED)
        return next(iter(runs)) if len(runs) == 1 else None

    @property
    def number_at(self) -> int | None:
        """The offset of the number that is next to be written on. It is whole with the last of its decimals; without
        any, with the token behind its last digit.
        """
        if self._number is not None:
            whole = "." in self._number.text and self._number.literals.ends(self._number.written)
            return None if whole else self._number.start
        end = self._node.paths[0].end if self._node.paths else None
        return self._base + end.start if isinstance(end, NumberSlot) else None

    def fork(self) -> ChoicePoint:
        """Return what may come next; for after `forced()`, unless all is written."""
        if self.finished:
            raise LanguageError("the decision is finished", reason_code=MASK_FAILED)
        if self._text is not None:
            return ChoicePoint(self._text.name, self._text_tokens(self._text), (), self._text_start, finite=False)
        parting = self._node.parting
        if self._number is not None or parting is None:
            return self._number_fork()
        return ChoicePoint(parting.choice, parting.tokens, parting.labels, self._base + parting.start, finite=True)

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

    def leading(self, text: bytes) -> list[int]:
        """Return the tokens with which `text` may go on here, every token of a spelling. For after `forced()`.

        Of free text, whose tokens are most of a vocabulary, what the tokenizer makes of it and of its first character; `take`
        may refuse these.
        """
        if self.finished or not text:
            return []
        if self._text is None:
            tokens = self.fork().tokens.tolist()
        else:
            made = (self._spelling.words.tokenize(text[:size], special=False)[:1] for size in (1, LEADING_BYTES_MAX))
            tokens = list(dict.fromkeys([*chain.from_iterable(made), *self._text.then.children]))
        return [token for token in tokens if text.startswith(self._spelling.piece(token) or b"\0")]

    def towards(self, literal: str) -> tuple[int, ...]:
        """Return the tokens that write what is left of this number; nothing where it is none that may be written here, or
        is a negative one whose sign is still to be written.
        """
        number = self._here()
        if number is None or not literal.startswith(number.text):
            return ()
        left, written = literal[len(number.text) :], number.written
        if not _DIGITS.fullmatch(left) or (written.closed and left[0] != "."):
            return ()
        for char in left:
            after = number.literals.after(written, char)
            if after is None:
                return ()
            written = after
        return tuple(self._spelling.number(left)) if number.literals.ends(written) else ()

    def alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (label, all tokens from here through the one that completes the option), none a prefix of another.

        For a finite choice of which nothing is decided yet, else nothing.
        """
        if self.finished or self._text is not None:
            return ()
        if self._number is not None or self._node.parting is None:
            return self._number_alternatives()
        return self._node.parting.alternatives

    # Tries

    def _step(self, node: Node, token: int) -> None:
        child = node.children.get(token)
        if child is None:
            raise _refused()
        self._node = child
        self._written.append(token)
        self.data += child.piece
        self._enter()

    def _enter(self) -> None:
        """Go on to what begins where a path ends. Where a sign may still be written, the trie is not left yet."""
        self._runs = None
        end = self._node.end
        if end is None or self._node.children:
            return
        if isinstance(end, NumberSlot):
            self._number = self._writing(end)
        elif isinstance(end, TextEnd):
            self._text, self._text_start = end, len(self.data)
        else:
            self._finish()

    def _finish(self) -> None:
        self._unspelled = f'{self._context_ref}"}}'.encode()
        self.data += self._unspelled
        self.finished = True

    # Text

    def _chars_left(self) -> int:
        return self._text_start + self._envelope.rationale_chars_max - len(self.data)

    def _text_tokens(self, text: TextEnd) -> NDArray[np.intp]:
        """Return what closes the text, then what may go on with it."""
        return np.concatenate([_ids(list(text.then.children)), self._spelling.text(self._chars_left())])

    def _take_text(self, text: TextEnd, token: int) -> None:
        if token in text.then.children:
            self._text, self._base = None, len(self.data)
            self._step(text.then, token)
            return
        if not 0 < self._spelling.text_chars.get(token, 0) <= self._chars_left():
            raise _refused()
        self._written.append(token)
        self.data += self._spelling.piece(token)

    # Numbers

    def _writing(self, end: NumberSlot) -> _Writing:
        allowed, every = self._bound(end)
        start = len(self.data) - end.negative
        return _Writing(end, DigitMatcher(allowed, negative=end.negative), every, start, "-" * end.negative)

    def _here(self) -> _Writing | None:
        """Return the number that is being written, or could be from here without a sign."""
        if self._number is None and isinstance(self._node.end, NumberSlot):
            return self._writing(self._node.end)
        return self._number

    def _open_runs(self) -> dict[int, tuple[str, DigitPrefix | None]]:
        """Return the tokens that go on with a number, or end it (None): what they write of it, what then stands."""
        if self._runs is None:
            self._runs = {}
            number = self._here()
            if number is not None:
                self._runs = dict(self._number_runs(number))
        return self._runs

    def _number_runs(self, number: _Writing) -> Iterator[tuple[int, tuple[str, DigitPrefix | None]]]:
        digits = self._spelling.digits
        for run, after in number.literals.chunks(number.written, self._spelling.chunk):
            yield digits[run], (run, after)
        pointed = number.literals.after(number.written, ".")
        if pointed is not None:
            yield digits["."], (".", pointed)
        if number.literals.ends(number.written):
            for token in number.end.then.children:
                yield token, ("", None)

    def _take_run(self, token: int, run: str, after: DigitPrefix | None) -> None:
        number = self._here()
        if number is None:
            raise _refused()
        self._runs = None
        if after is None:
            self._number, self._base = None, len(self.data)
            self._step(number.end.then, token)
            return
        self._number = replace(number, text=number.text + run, written=after)
        self._written.append(token)
        self.data += run.encode()

    def _number_fork(self) -> ChoicePoint:
        number = self._here()
        tokens, labels = list[int](), list[tuple[str, ...]]()
        if number is not None:
            tokens += self._open_runs()
            labels += (number.labels(run, after) for run, after in self._open_runs().values())
            if self._number is not None:
                return ChoicePoint(
                    number.end.name, _ids(tokens), tuple(labels), number.start, finite=bool(number.every)
                )
        end = _number_of(self._node.paths[0])
        allowed, every = self._bound(end)
        for token, child in self._node.children.items():
            tokens.append(token)
            labels.append(_signed(allowed, every, {_number_of(path).negative for path in child.paths}))
        return ChoicePoint(end.name, _ids(tokens), tuple(labels), self._base + end.start, finite=bool(every))

    def _number_alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if self._number is not None:
            text, every = self._number.text, self._number.every
            ways: list[tuple[tuple[int, ...], NumberSlot]] = [((), self._number.end)]
            if any(each.startswith("-") != self._number.end.negative for each in every):
                return ()  # the sign is decided
        else:
            ways = [(path.tokens[self._node.depth :], _number_of(path)) for path in self._node.paths]
            text, (_, every) = "", self._bound(ways[0][1])
        if len(every) < 2 or not all(each.startswith(text) for each in every):
            return ()  # one value is no choice, even where the tokens part over what comes after it
        found = list[tuple[str, tuple[int, ...]]]()
        for each in every:
            lead, end = next(way for way in ways if way[1].negative == each.startswith("-"))
            tokens = (*lead, *self._spelling.number(each[max(len(text), end.negative) :]))
            closed = [()] if "." in each else [(token,) for token in end.then.children]
            found += [(each, tokens + close) for close in closed]
        return tuple(found)

    def _bound(self, end: NumberSlot) -> tuple[Bound, tuple[str, ...]]:
        """Return a number's bound, and its literals where they are few."""
        _, allowed = self._envelope.kinds[end.kind].params[end.param]
        return allowed, every_literal(allowed) if len(allowed) <= CHOICE_VALUES_MAX else ()


def _signed(allowed: Bound, every: tuple[str, ...], signs: set[bool]) -> tuple[str, ...]:
    """Return what a token leaves open that settles no more than the sign: the literals, or the first characters."""
    if every:
        return tuple(each for each in every if each.startswith("-") in signs)
    digits = (run for run, _ in DigitMatcher(allowed, negative=False).chunks(START, 1)) if False in signs else ()
    return (*digits, *("-" for sign in signs if sign))


def _number_of(path: Path) -> NumberSlot:
    if not isinstance(path.end, NumberSlot):
        raise LanguageError("the walk is at no number", reason_code=MASK_FAILED)
    return path.end


def _ids(tokens: list[int]) -> NDArray[np.intp]:
    return np.array(tokens, dtype=np.intp)


def _refused() -> LanguageError:
    return LanguageError("the language does not permit this token", reason_code=MASK_FAILED)

"""Writes one decision token by token: which tokens are forced, where there is a choice, and what each token leaves open.

It knows tokens and bytes, and no model. A token outside `choice_point().tokens` is refused.
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
from sds.grammars.tokens.trie import NumberSlot, Path, TextEnd, TrieNode
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope
from sds.kernel.errors import LanguageError

MASK_FAILED = "MASK_FAILED"
PREFIX_BYTES_MAX = 32  # of a text, tokenized to get its first token
_BEFORE_REF = b'","context_ref":"'
_DIGITS = re.compile(r"[0-9]*\.?[0-9]+")


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """A place where more than one token may come next.

    `choice`: "action", "reason_code", "rationale", or the name of a parameter. `tokens`: the permitted ones, at least
    two. `labels`: for each token the options it leaves open. These are whole labels where the choice is `finite`; for a
    wider number the characters that come next (`""`: it ends here); for text there are none. `start`: the byte offset
    of the choice; the token of a sign may begin before it.
    """

    choice: str
    tokens: NDArray[np.intp]
    labels: tuple[tuple[str, ...], ...]
    start: int
    finite: bool


# The characters that a token adds to a number, and the prefix after it; None: the token ends the number.
_DigitRun = tuple[str, DigitPrefix | None]


@dataclass(frozen=True, slots=True, eq=False)
class _OpenNumber:
    """A number being written. `text`: its characters so far, sign included. `start`: its byte offset.

    `listed`: all its literals, of both signs; () where there are more than CHOICE_VALUES_MAX.
    """

    slot: NumberSlot
    digits: DigitMatcher
    listed: tuple[str, ...]
    start: int
    text: str
    prefix: DigitPrefix = START

    def labels(self, run: str, after: DigitPrefix | None) -> tuple[str, ...]:
        """Return the options that stay open after a run of digits."""
        if not self.listed:
            return (run,)
        if after is None:
            return (self.text,)
        text = self.text + run
        begun = (literal for literal in self.listed if literal.startswith(text))
        return tuple(literal for literal in begun if not (after.closed and literal[len(text) :][:1].isdigit()))


class TokenMatcher:
    """The state of one decision in one language. `data`: the bytes written; `tokens`: the same as tokens.

    Call `accept_forced()` first. `grammar_sha256`: digest of the compiled grammar. The end of a decision, after its
    last choice, is spelled only when `tokens` is read, because no model reads it.

    Every method raises LanguageError (MASK_FAILED) where the language is left or nothing can follow, and whatever the
    tokenizer raises.
    """

    def __init__(self, index: TokenizerIndex, root: TrieNode, envelope: DecisionEnvelope, context_ref: str) -> None:
        self.data = b""
        self._written: list[int] = []
        self.finished = False
        self.grammar_sha256 = root.digest()
        self._index, self._envelope, self._context_ref = index, envelope, context_ref
        self._unspelled = b""
        self._node = root
        self._base = 0  # the byte offset at which the trie's paths begin
        self._number: _OpenNumber | None = None
        self._text: TextEnd | None = None
        self._text_start = 0
        self._runs: dict[int, _DigitRun] | None = None

    @property
    def tokens(self) -> list[int]:
        if self._unspelled:
            self._written += self._index.fixed(self._unspelled, before=_BEFORE_REF)
            self._unspelled = b""
        return self._written

    def canonical(self) -> bool:
        """Return whether the tokenizer itself makes these tokens of `data`; if so, the end gets the tokenizer's spelling."""
        every = self._index.tokenizer.tokenize(self.data, special=False)
        if self._unspelled and every[: len(self._written)] == self._written:
            self._written, self._unspelled = every, b""
        return every == self.tokens

    def copy(self) -> TokenMatcher:
        """Return an independent matcher in the same state."""
        copied = copy(self)
        self._written = self._written.copy()  # the copy keeps the list they shared
        return copied

    def accept_forced(self) -> list[int]:
        """Write everything that is forced now and return these tokens, without those of the decision's end."""
        begun = len(self._written)
        while not self.finished:
            if self._number is None and self._text is None and (run := self._node.run) is not None:
                tokens, data, self._node = run
                self._written += tokens
                self.data += data
                self._enter()
            elif (token := self.forced_token()) is not None:
                self.accept(token)
            else:
                break
        return self._written[begun:]

    def forced_token(self) -> int | None:
        """Return the only token that may come next, without writing it; None where there are several."""
        if self._text is not None:
            tokens = self._text_tokens(self._text)
            return int(tokens[0]) if len(tokens) == 1 else None
        if self._number is None:  # a node without a run has several tokens, even if only for a sign
            return self._node.run[0][0] if self._node.run else None
        runs = self._open_runs()
        if not runs:
            raise LanguageError("no digit can follow", reason_code=MASK_FAILED)
        return next(iter(runs)) if len(runs) == 1 else None

    @property
    def number_start(self) -> int | None:
        """The byte offset of the number that is being written or begins here; None elsewhere.

        A number is whole after the last of its decimals; without decimals, after the token behind its last digit.
        """
        if self._number is not None:
            whole = "." in self._number.text and self._number.digits.ends(self._number.prefix)
            return None if whole else self._number.start
        end = self._node.paths[0].end if self._node.paths else None
        return self._base + end.start if isinstance(end, NumberSlot) else None

    def choice_point(self) -> ChoicePoint:
        """Return what may come next. Call it after `accept_forced()`, unless the decision is finished."""
        self._check_unfinished()
        if self._text is not None:
            return ChoicePoint(self._text.name, self._text_tokens(self._text), (), self._text_start, finite=False)
        branch = self._node.branch
        if self._number is not None or branch is None:
            return self._number_choice_point()
        return ChoicePoint(branch.choice, branch.tokens, branch.labels, self._base + branch.start, finite=True)

    def accept(self, token: int) -> None:
        """Write a token that may come next, forced or not."""
        self._check_unfinished()
        if self._text is not None:
            self._accept_text(self._text, token)
            return
        run = self._open_runs().get(token)
        if run is not None:
            self._accept_run(token, *run)
        elif self._number is None:
            self._descend(self._node, token)
        else:
            raise _refused()

    def prefix_tokens(self, text: bytes) -> list[int]:
        """Return the permitted tokens that `text` begins with. Call it after `accept_forced()`.

        Within free text, whose tokens are most of a vocabulary, these are only the first tokens that the tokenizer
        makes of `text` and of its first character; `accept` may refuse them.
        """
        if self.finished or not text:
            return []
        if self._text is None:
            tokens = self.choice_point().tokens.tolist()
        else:
            tokenize = self._index.tokenizer.tokenize
            made = (tokenize(text[:size], special=False)[:1] for size in (1, PREFIX_BYTES_MAX))
            tokens = list(dict.fromkeys([*chain.from_iterable(made), *self._text.then.children]))
        return [token for token in tokens if text.startswith(self._index.piece(token) or b"\0")]

    def tokens_for(self, literal: str) -> tuple[int, ...]:
        """Return the tokens that write the rest of this number; () where it may not be written here, and for a negative
        number whose sign is not written yet.
        """
        number = self._number_here()
        if number is None or not literal.startswith(number.text):
            return ()
        left, prefix = literal[len(number.text) :], number.prefix
        if not _DIGITS.fullmatch(left) or (prefix.closed and left[0] != "."):
            return ()
        for char in left:
            after = number.digits.after(prefix, char)
            if after is None:
                return ()
            prefix = after
        return tuple(self._index.number(left)) if number.digits.ends(prefix) else ()

    def alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (label, all tokens from here through the one that completes the option), none a prefix of another.

        () unless the choice is finite and nothing of it is decided yet.
        """
        if self.finished or self._text is not None:
            return ()
        if self._number is not None or self._node.branch is None:
            return self._number_alternatives()
        return self._node.branch.alternatives

    def _check_unfinished(self) -> None:
        if self.finished:
            raise LanguageError("the decision is finished", reason_code=MASK_FAILED)

    # Tries

    def _descend(self, node: TrieNode, token: int) -> None:
        child = node.children.get(token)
        if child is None:
            raise _refused()
        self._node = child
        self._written.append(token)
        self.data += child.piece
        self._enter()

    def _enter(self) -> None:
        """Begin what the path ends with. While a sign may still be written, the trie is not left."""
        self._runs = None
        end = self._node.end
        if end is None or self._node.children:
            return
        if isinstance(end, NumberSlot):
            self._number = self._open_number(end)
        elif isinstance(end, TextEnd):
            self._text, self._text_start = end, len(self.data)
        else:
            self._unspelled = f'{self._context_ref}"}}'.encode()
            self.data += self._unspelled
            self.finished = True

    # Text

    def _chars_left(self) -> int:
        return self._text_start + self._envelope.rationale_chars_max - len(self.data)

    def _text_tokens(self, text: TextEnd) -> NDArray[np.intp]:
        """Return the tokens that close the text, then those that may continue it."""
        return np.concatenate([_ids(list(text.then.children)), self._index.text(self._chars_left())])

    def _accept_text(self, text: TextEnd, token: int) -> None:
        if token in text.then.children:
            self._text, self._base = None, len(self.data)
            self._descend(text.then, token)
            return
        if not 0 < self._index.text_chars.get(token, 0) <= self._chars_left():
            raise _refused()
        self._written.append(token)
        self.data += self._index.piece(token)

    # Numbers

    def _open_number(self, slot: NumberSlot) -> _OpenNumber:
        allowed, listed = self._bound(slot)
        start = len(self.data) - slot.negative
        return _OpenNumber(slot, DigitMatcher(allowed, negative=slot.negative), listed, start, "-" * slot.negative)

    def _number_here(self) -> _OpenNumber | None:
        """Return the number that is being written, or that may begin here without a sign."""
        if self._number is None and isinstance(self._node.end, NumberSlot):
            return self._open_number(self._node.end)
        return self._number

    def _open_runs(self) -> dict[int, _DigitRun]:
        """Return the tokens that may continue or end a number."""
        if self._runs is None:
            number = self._number_here()
            self._runs = {} if number is None else dict(self._number_runs(number))
        return self._runs

    def _number_runs(self, number: _OpenNumber) -> Iterator[tuple[int, _DigitRun]]:
        tokens = self._index.digits
        for run, after in number.digits.chunks(number.prefix, self._index.chunk):
            yield tokens[run], (run, after)
        pointed = number.digits.after(number.prefix, ".")
        if pointed is not None:
            yield tokens["."], (".", pointed)
        if number.digits.ends(number.prefix):
            for token in number.slot.then.children:
                yield token, ("", None)

    def _accept_run(self, token: int, run: str, after: DigitPrefix | None) -> None:
        number = self._number_here()
        if number is None:
            raise _refused()
        self._runs = None
        if after is None:
            self._number, self._base = None, len(self.data)
            self._descend(number.slot.then, token)
            return
        self._number = replace(number, text=number.text + run, prefix=after)
        self._written.append(token)
        self.data += run.encode()

    def _number_choice_point(self) -> ChoicePoint:
        tokens, labels = list[int](), list[tuple[str, ...]]()
        if (number := self._number_here()) is not None:
            tokens += self._open_runs()
            labels += (number.labels(run, after) for run, after in self._open_runs().values())
            if self._number is not None:
                name, finite = number.slot.name, bool(number.listed)
                return ChoicePoint(name, _ids(tokens), tuple(labels), number.start, finite=finite)
        slot = _slot_of(self._node.paths[0])
        allowed, listed = self._bound(slot)
        for token, child in self._node.children.items():
            tokens.append(token)
            labels.append(_signed(allowed, listed, {_slot_of(path).negative for path in child.paths}))
        return ChoicePoint(slot.name, _ids(tokens), tuple(labels), self._base + slot.start, finite=bool(listed))

    def _number_alternatives(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if self._number is not None:
            text, listed = self._number.text, self._number.listed
            leads: list[tuple[tuple[int, ...], NumberSlot]] = [((), self._number.slot)]
            if any(literal.startswith("-") != self._number.slot.negative for literal in listed):
                return ()  # the sign is decided already
        else:
            leads = [(path.tokens[self._node.depth :], _slot_of(path)) for path in self._node.paths]
            text, (_, listed) = "", self._bound(leads[0][1])
        if len(listed) < 2 or not all(literal.startswith(text) for literal in listed):
            return ()  # one value is no choice, even if several tokens may follow it
        alternatives = list[tuple[str, tuple[int, ...]]]()
        for literal in listed:
            lead, slot = next(each for each in leads if each[1].negative == literal.startswith("-"))
            tokens = (*lead, *self._index.number(literal[max(len(text), slot.negative) :]))
            closings = [()] if "." in literal else [(token,) for token in slot.then.children]
            alternatives += [(literal, tokens + closing) for closing in closings]
        return tuple(alternatives)

    def _bound(self, slot: NumberSlot) -> tuple[Bound, tuple[str, ...]]:
        """Return a number's bound, and its literals where these are few."""
        _, allowed = self._envelope.kinds[slot.kind].params[slot.param]
        return allowed, every_literal(allowed) if len(allowed) <= CHOICE_VALUES_MAX else ()


def _signed(allowed: Bound, listed: tuple[str, ...], signs: set[bool]) -> tuple[str, ...]:
    """Return the options after a token that decides no more than the sign: the literals, or the first characters."""
    if listed:
        return tuple(literal for literal in listed if literal.startswith("-") in signs)
    digits = (run for run, _ in DigitMatcher(allowed, negative=False).chunks(START, 1)) if False in signs else ()
    return (*digits, *("-" for sign in signs if sign))


def _slot_of(path: Path) -> NumberSlot:
    if not isinstance(path.end, NumberSlot):
        raise LanguageError("no number begins here", reason_code=MASK_FAILED)
    return path.end


def _ids(tokens: list[int]) -> NDArray[np.intp]:
    return np.array(tokens, dtype=np.intp)


def _refused() -> LanguageError:
    return LanguageError("the language does not permit this token", reason_code=MASK_FAILED)

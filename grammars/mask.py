"""The tokens a language permits next, from llguidance.

llguidance's matcher never raises on bad grammars or tokens: it falls into an error state and stays there, and a caller
who does not ask goes on unconstrained. Here every call asks, and every error is a `LanguageError` (MASK_FAILED).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from sds.grammars import emit_lark
from sds.grammars.language import language
from sds.kernel.bounds import bound
from sds.kernel.envelope import DENY, KindBound, envelope_of
from sds.kernel.errors import LanguageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sds.grammars.language import Language

MASK_FAILED = "MASK_FAILED"
PROOF_TOKENS_MAX = 512
_T = TypeVar("_T")
_Rank = tuple[int, bytes]


class Mask:
    """One walk through one language, token by token. After an error every further call fails too."""

    def __init__(self, tokenizer: LLTokenizer, language: Language) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._end_tokens = np.array(tokenizer.eos_tokens, dtype=np.intp)
        grammar = LLMatcher.grammar_from_lark(emit_lark.emit(language))
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._refuse_error()

    @property
    def finished(self) -> bool:
        """Whether what was written is a whole sentence of the language and nothing can follow it."""
        return self._ask(self._matcher.is_accepting) and self._ask(self._matcher.is_stopped)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as their spelling is settled; possibly none."""
        return self._ask(self._matcher.compute_ff_tokens)

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, shape [vocab_size]; at least one. End tokens are never among them."""
        bits = np.frombuffer(self._ask(self._matcher.compute_bitmask), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        allowed[self._end_tokens] = False
        if not allowed.any():
            raise LanguageError("the mask permits no token", reason_code=MASK_FAILED)
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        """Take these tokens as written; raise when the language does not permit them."""
        if tokens and not self._ask(lambda: self._matcher.consume_tokens(list(tokens))):
            raise LanguageError("the mask refused a token", reason_code=MASK_FAILED)

    def _ask(self, question: Callable[[], _T]) -> _T:
        try:
            answer = question()
        except Exception as error:
            raise LanguageError("the mask failed", reason_code=MASK_FAILED) from error
        self._refuse_error()
        return answer

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            line = (self._matcher.get_error().splitlines() or ["unknown cause"])[0]
            raise LanguageError(f"the mask failed: {line[:200]}", reason_code=MASK_FAILED)


def prove_alive(tokenizer: LLTokenizer) -> None:
    """Raise LanguageError unless masks over this tokenizer really constrain. Run once at start-up.

    A small language is walked as a model would that wants its longest, shortest, first and last bytes; every end must
    be one of the language's six decisions, and a token that the mask forbids must be refused.
    """
    proof, decisions = _proof()
    start = Mask(tokenizer, proof)
    start.advance(start.forced())
    forbidden = np.flatnonzero(~start.allowed())
    if not len(forbidden):
        raise _dead("forbids nothing")
    try:
        start.advance([int(forbidden[-1])])
    except LanguageError:
        pass
    else:
        raise _dead("took a forbidden token")
    for wish in (_longest, _shortest, _last, _first):
        _walk(tokenizer, proof, decisions, wish)


def _proof() -> tuple[Language, set[bytes]]:
    context_ref = "0" * 64
    amounts = bound(995, 1010, step=5, scale=2)
    if amounts is None:
        raise _dead("has no language to be proved on")
    kinds = [KindBound(DENY, ("NO",)), KindBound("PAY", ("YES",), (("amount", amounts),))]
    written = [("DENY", "", "NO"), ("ESCALATE", "", "HUMAN_REVIEW")]
    written += [("PAY", f'"amount":{amount}', "YES") for amount in ("9.95", "10.00", "10.05", "10.10")]
    form = '{{"action":"{}","params":{{{}}},"reason_code":"{}","context_ref":"{}"}}'
    return language(envelope_of(kinds), context_ref), {form.format(*w, context_ref).encode() for w in written}


def _walk(tokenizer: LLTokenizer, proof: Language, decisions: set[bytes], wish: Callable[[bytes], _Rank]) -> None:
    mask, tokens = Mask(tokenizer, proof), list[int]()
    while not mask.finished:
        step = mask.forced() or [_favourite(tokenizer, mask.allowed(), wish)]
        mask.advance(step)
        tokens += step
        written = tokenizer.decode_bytes(tokens)
        if len(tokens) > PROOF_TOKENS_MAX or not any(decision.startswith(written) for decision in decisions):
            raise _dead("let a walk leave the language")
    if tokenizer.decode_bytes(tokens) not in decisions:
        raise _dead("ended before the decision did")


def _favourite(tokenizer: LLTokenizer, allowed: NDArray[np.bool_], wish: Callable[[bytes], _Rank]) -> int:
    return max(map(int, np.flatnonzero(allowed)), key=lambda token: wish(tokenizer.decode_bytes([token])))


def _longest(piece: bytes) -> _Rank:
    return len(piece), piece


def _shortest(piece: bytes) -> _Rank:
    return -len(piece), piece


def _last(piece: bytes) -> _Rank:
    return 0, piece


def _first(piece: bytes) -> _Rank:
    return 0, bytes(255 - byte for byte in piece)


def _dead(what: str) -> LanguageError:
    return LanguageError(f"the mask is not alive: it {what}", reason_code=MASK_FAILED, hint="run `sds doctor`")

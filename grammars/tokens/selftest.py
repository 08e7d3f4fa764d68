"""The proof, at start-up, that walks in a model's tokens really constrain; and one walk along given bytes."""

from __future__ import annotations

from collections.abc import Callable

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import MASK_FAILED, TokenMatcher
from sds.grammars.tokens.tokenizer import Tokenizer
from sds.kernel.envelope.bounds import bound
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import LanguageError

PROOF_TOKENS_MAX = 512
FOLLOW_TURNS_MAX = 20_000
_NO_REF = "0" * 64
_Rank = tuple[int, bytes]


def check_mask_constrains(words: Tokenizer) -> None:
    """Raise LanguageError unless walks in these words really constrain. Run once at start-up.

    A small language is walked as a model would that wants its longest, shortest, first and last bytes; every end must
    be one of the language's six decisions, and at the first choice every other token of the vocabulary must be refused.
    """
    proof, decisions = _proof()
    planner = GrammarCompiler(words)
    _refuses(planner.walk(proof, _NO_REF), words.vocab_size)
    for wish in (_longest, _shortest, _last, _first):
        _follow_wish(planner.walk(proof, _NO_REF), words, decisions, wish)


def follow(walk: TokenMatcher, data: bytes) -> bytes:
    """Write `data` as far as the language goes along, and return what was written.

    Where several tokens continue `data`, the longest is tried first.
    """
    best, open_ = b"", [walk]
    for _ in range(FOLLOW_TURNS_MAX):
        if not open_ or best == data:
            break
        at = open_.pop()
        at.forced()
        if data.startswith(at.data):
            best = max(best, at.data, key=len)
            taken = (_taken(at, token) for token in at.leading(data[len(at.data) :]))
            open_ += sorted(filter(None, taken), key=lambda after: len(after.data))
    return best


def _taken(walk: TokenMatcher, token: int) -> TokenMatcher | None:
    """Return a copy of the walk that has taken the token; None where it is refused."""
    copied = walk.copy()
    try:
        copied.take(token)
    except LanguageError:
        return None
    return copied


def _proof() -> tuple[DecisionEnvelope, set[bytes]]:
    amounts = bound(995, 1010, step=5, scale=2)
    if amounts is None:
        raise _dead("has no language to be proved on")
    kinds = [KindBound(DENY, ("NO",)), KindBound("PAY", ("YES",), (("amount", amounts),))]
    written = [("DENY", "", "NO"), ("ESCALATE", "", "HUMAN_REVIEW")]
    written += [("PAY", f'"params":{{"amount":{amount}}},', "YES") for amount in ("9.95", "10.00", "10.05", "10.10")]
    form = '{{"action":"{}",{}"reason":"{}","context_ref":"{}"}}'
    return envelope_of(kinds), {form.format(*w, _NO_REF).encode() for w in written}


def _refuses(walk: TokenMatcher, vocab_size: int) -> None:
    walk.forced()
    open_ = set(walk.fork().tokens.tolist())
    if any(_taken(walk, token) for token in range(-1, vocab_size + 1) if token not in open_):
        raise _dead("took a forbidden token")


def _follow_wish(walk: TokenMatcher, words: Tokenizer, decisions: set[bytes], wish: Callable[[bytes], _Rank]) -> None:
    while not walk.finished:
        if not walk.forced():
            walk.take(max(walk.fork().tokens.tolist(), key=lambda token: wish(words.piece(token))))
        if len(walk.tokens) > PROOF_TOKENS_MAX or not any(each.startswith(walk.data) for each in decisions):
            raise _dead("let a walk leave the language")
    if walk.data not in decisions or walk.data != b"".join(map(words.piece, walk.tokens)):
        raise _dead("ended elsewhere than the decision")


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

"""The self-test at start-up, whether a mask over a model's tokens constrains; and `follow`, what bytes can be written."""

from __future__ import annotations

from collections.abc import Callable

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import MASK_FAILED, TokenMatcher
from sds.grammars.tokens.tokenizer import Tokenizer
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, bound, envelope_of
from sds.kernel.errors import LanguageError

SELFTEST_TOKENS_MAX = 512
FOLLOW_STEPS_MAX = 20_000
_NO_REF = "0" * 64
_Preference = Callable[[bytes], tuple[int, bytes]]
_PREFERENCES: tuple[_Preference, ...] = (
    lambda piece: (len(piece), piece),  # the longest
    lambda piece: (-len(piece), piece),  # the shortest
    lambda piece: (0, piece),  # the last in the order of bytes
    lambda piece: (0, bytes(255 - byte for byte in piece)),  # the first
)


def check_mask_constrains(tokenizer: Tokenizer) -> None:
    """Raise LanguageError unless matchers over this tokenizer really constrain. Run once at start-up.

    Four models with different preferences write a small language. Every result must be one of its six decisions, and at
    the first choice every other token of the vocabulary must be refused.
    """
    envelope, decisions = _small_language()
    compiler = GrammarCompiler(tokenizer)
    _check_refuses(compiler.matcher(envelope, _NO_REF), tokenizer.vocab_size)
    for preference in _PREFERENCES:
        _check_stays_within(compiler.matcher(envelope, _NO_REF), tokenizer, decisions, preference)


def follow(matcher: TokenMatcher, data: bytes) -> bytes:
    """Write `data` as far as the language permits and return what was written, after at most FOLLOW_STEPS_MAX tries.

    Where several tokens continue `data`, the longest is tried first.
    """
    best, open_ = b"", [matcher]
    for _ in range(FOLLOW_STEPS_MAX):
        if not open_ or best == data:
            break
        current = open_.pop()
        current.accept_forced()
        if data.startswith(current.data):
            best = max(best, current.data, key=len)
            accepted = (_accepted(current, token) for token in current.prefix_tokens(data[len(current.data) :]))
            open_ += sorted(filter(None, accepted), key=lambda after: len(after.data))
    return best


def _accepted(matcher: TokenMatcher, token: int) -> TokenMatcher | None:
    """Return a copy of the matcher that has accepted the token; None where it is refused."""
    copied = matcher.copy()
    return copied if _accepts(copied, token) else None


def _accepts(matcher: TokenMatcher, token: int) -> bool:
    """Have the matcher accept a token; False where it refuses it, and is as before."""
    try:
        matcher.accept(token)
    except LanguageError:
        return False
    return True


def _small_language() -> tuple[DecisionEnvelope, set[bytes]]:
    amounts = bound(995, 1010, step=5, scale=2)
    if amounts is None:
        raise _not_alive("has no language to be tested on")
    kinds = [KindBound(DENY, ("NO",)), KindBound("PAY", ("YES",), (("amount", amounts),))]
    written = [("DENY", "", "NO"), ("ESCALATE", "", "HUMAN_REVIEW")]
    written += [("PAY", f'"params":{{"amount":{amount}}},', "YES") for amount in ("9.95", "10.00", "10.05", "10.10")]
    form = '{{"action":"{}",{}"reason":"{}","context_ref":"{}"}}'
    return envelope_of(kinds), {form.format(*w, _NO_REF).encode() for w in written}


def _check_refuses(matcher: TokenMatcher, vocab_size: int) -> None:
    matcher.accept_forced()
    permitted = set(matcher.choice_point().tokens.tolist())
    for token in range(-1, vocab_size + 1):
        if token not in permitted and _accepts(matcher, token):
            raise _not_alive("accepted a forbidden token")


def _check_stays_within(
    matcher: TokenMatcher, tokenizer: Tokenizer, decisions: set[bytes], preference: _Preference
) -> None:
    while not matcher.finished:
        if not matcher.accept_forced():
            tokens = matcher.choice_point().tokens.tolist()
            matcher.accept(max(tokens, key=lambda token: preference(tokenizer.piece(token))))
        if len(matcher.tokens) > SELFTEST_TOKENS_MAX or not any(each.startswith(matcher.data) for each in decisions):
            raise _not_alive("let a decision leave the language")
    if matcher.data not in decisions or matcher.data != b"".join(map(tokenizer.piece, matcher.tokens)):
        raise _not_alive("did not end where the decision ends")


def _not_alive(what: str) -> LanguageError:
    return LanguageError(f"the grammar mask does not work: it {what}", reason_code=MASK_FAILED, hint="run `sds doctor`")

"""A decision made the slow and obvious way: every text read alone, in one plain pass, every share in Python floats.

It shares with the decoder the language and the rules of choosing, and none of its passes, forks, tallies or numpy.
`greedy_action` reads other engines' spellings: any that the language permits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sds.decoding.decoder import Mode
from sds.decoding.number_search import PREFIXES_MAX
from sds.grammars.language import Language
from sds.grammars.tokens.matcher import TokenMatcher
from sds.kernel.envelope.envelope import KindBound
from sds.models.protocol import Backend, Row
from tests.grammars.llguidance_mask import Mask, tokenizer_of

CaseView = Callable[[Sequence[int]], list[float]]  # what is written -> the log-probability of every token after it
Shares = dict[str, float]
Text = tuple[int, ...]


def looking(backend: Backend, prompt: Sequence[Sequence[int]]) -> CaseView:
    """Return how to see what comes after the prompt and some written tokens: its last section and all of them again.

    Whatever was read before is read no more: what comes after the prefixes of a text was seen when it was read.
    """
    read: dict[Text, NDArray[np.float32]] = {}
    known: dict[Text, list[float]] = {}

    def look(written: Sequence[int]) -> list[float]:
        key = tuple(written)
        if key not in read:
            backend.prefill(prompt[:-1])
            (logits,) = backend.run([Row(0, [*prompt[-1], *key], len(key) + 1)])
            for i in range(len(key) + 1):
                read.setdefault(key[:i], logits[i])
        if key not in known:
            known[key] = log_probabilities(read[key])
        return known[key]

    return look


@dataclass
class Slow:
    """A decision as the reference makes it: its bytes, and for each choice (name, shares, chosen, z)."""

    data: bytes = b""
    choices: list[tuple[str, Shares, str, float]] = field(default_factory=list)


def slow_decision(look: CaseView, matcher: TokenMatcher, mode: Mode) -> Slow:
    made = Slow()
    number: Text = ()  # all tokens through the end of the number that was searched
    searched: int | None = None
    matcher.accept_forced()
    while not matcher.finished:
        point = matcher.choice_point()
        alternatives = matcher.alternatives() if point.finite else ()
        if alternatives:
            decide = _exact if mode == "exact" or (mode, point.choice) == ("exact-kinds", "action") else _greedy
            shares, chosen, z = decide(look, list(matcher.tokens), alternatives)
            made.choices.append((point.choice, shares, chosen, z))
            taken: Sequence[int] = dict(alternatives)[chosen]
        else:
            if mode == "exact" and point.labels and not point.finite and searched != point.start:
                searched, number = point.start, likeliest_number(look, matcher)
            tokens = [int(token) for token in point.tokens]
            logp = look(matcher.tokens)
            best = max(range(len(tokens)), key=lambda i: logp[tokens[i]])
            if number:
                best = tokens.index(number[len(matcher.tokens)]) if len(matcher.tokens) < len(number) else best
            taken = [tokens[best]]
            if point.labels:
                name = f"{point.choice}[{max(0, len(matcher.data) - point.start)}]"
                shares = normalised(
                    {"|".join(label): logp[token] for label, token in zip(point.labels, tokens, strict=True)}
                )
                z = math.fsum(math.exp(logp[token]) for token in tokens)
                made.choices.append((name, shares, "|".join(point.labels[best]), z))
        for token in taken:
            matcher.accept(token)
        matcher.accept_forced()
    made.data = bytes(matcher.data)
    return made


def _exact(look: CaseView, written: list[int], alternatives: Sequence[tuple[str, Text]]) -> tuple[Shares, str, float]:
    """Score each alternative's whole text."""
    for _, text in alternatives:
        look([*written, *text[:-1]])
    scores = {
        label: math.fsum(look([*written, *text[:i]])[text[i]] for i in range(len(text))) for label, text in alternatives
    }
    chosen = max(scores, key=lambda label: scores[label])
    return normalised(scores), chosen, math.fsum(map(math.exp, scores.values()))


def likeliest_number(look: CaseView, matcher: TokenMatcher) -> Text:
    """Return all tokens through the end of the likeliest number; none where PREFIXES_MAX prefixes do not tell.

    One beginning after the other, the likeliest first. What it forces counts when it comes off the heap, and a whole
    number then waits for its turn once more.
    """
    start = matcher.number_start
    heap = [(0.0, 0, Text(), 0, False)]  # cost, order, tokens, how many of them the cost leaves out, whole
    order = 0
    for _ in range(PREFIXES_MAX + 1):
        cost, place, text, forced, whole = heapq.heappop(heap)
        if whole and not forced:
            return (*matcher.tokens, *text)
        at = len(text) - forced
        cost -= math.fsum(look([*matcher.tokens, *text[:i]])[text[i]] for i in range(at, len(text)))
        if whole:
            heapq.heappush(heap, (cost, place, text, 0, True))
            continue
        here = matcher.copy()
        for token in text:
            here.accept(token)
        logp = look(here.tokens)
        for token in map(int, here.choice_point().tokens):
            order += 1
            more = here.copy()
            more.accept(token)
            while more.number_start == start and (behind := more.forced_token()) is not None:
                more.accept(behind)
            tokens = tuple(more.tokens[len(matcher.tokens) :])
            left_out = len(tokens) - len(text) - 1
            heapq.heappush(heap, (cost - logp[token], order, tokens, left_out, more.number_start != start))
    return ()


def _greedy(look: CaseView, written: list[int], alternatives: Sequence[tuple[str, Text]]) -> tuple[Shares, str, float]:
    """Follow the likeliest next token until one alternative is left; what was left behind keeps its share."""
    shares: Shares = {}
    reach, whole_z, at = 1.0, 1.0, 0
    left = dict(alternatives)
    while len(left) > 1:
        nexts = list(dict.fromkeys(text[at] for text in left.values()))
        if len(nexts) > 1:
            logp = look([*written, *next(iter(left.values()))[:at]])
            z = math.fsum(math.exp(logp[token]) for token in nexts)
            best = max(nexts, key=lambda token: logp[token])
            for token in nexts:
                if token != best:
                    aside = "|".join(label for label, text in left.items() if text[at] == token)
                    shares[aside] = reach * math.exp(logp[token]) / z
            reach, whole_z = reach * math.exp(logp[best]) / z, whole_z * z
            left = {label: text for label, text in left.items() if text[at] == best}
        at += 1
    (chosen,) = left
    return {**shares, chosen: reach}, chosen, whole_z


def log_probabilities(logits: NDArray[np.float32]) -> list[float]:
    values = [float(value) for value in logits]
    peak = max(values)
    mass = peak + math.log(math.fsum(math.exp(value - peak) for value in values))
    return [value - mass for value in values]


def normalised(scores: Shares) -> Shares:
    peak = max(scores.values())
    whole = math.fsum(math.exp(score - peak) for score in scores.values())
    return {label: math.exp(score - peak) / whole for label, score in scores.items()}


def greedy_action(backend: Backend, prompt: Sequence[Sequence[int]], said: Language, *, forced_as_usual: bool) -> str:
    """Return the action that is written when each token is the likeliest of those permitted.

    `forced_as_usual`: what must come next is spelled as the tokenizer would, as llguidance does; without it any spelling
    is permitted, as in llama.cpp. The whole prompt in one batch, then one token a pass; nothing is skipped.
    """
    mask = Mask(tokenizer_of(backend), said)
    pieces = [backend.piece(token) for token in range(backend.vocab_size)]
    starts = [_start(kind) for kind in said.envelope.kinds]

    def permitted(data: bytes) -> NDArray[np.bool_]:
        if forced_as_usual:
            return mask.allowed()
        return np.array([bool(piece) and _agree(data + piece, starts) for piece in pieces])

    backend.prefill([])
    logits = backend.forward_one([token for section in prompt for token in section])
    data = b""
    while data.count(b'"') < 4:  # {"action":"..."
        token = int(np.where(permitted(data), logits, -np.inf).argmax())
        mask.advance([token])
        data += pieces[token]
        logits = backend.forward_one([token])
    return data.split(b'"')[3].decode()


def _start(kind: KindBound) -> bytes:
    return f'{{"action":"{kind.kind}",'.encode() + (b'"params":{' if kind.params else b'"reason":"')


def _agree(written: bytes, starts: Sequence[bytes]) -> bool:
    return any(start.startswith(written) or written.startswith(start) for start in starts)

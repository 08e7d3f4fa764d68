"""Decodes one decision in a language, with a forward pass only where the model has a choice.

A decision is a generator: it yields the rows of its next pass and is sent their logits, so the scheduler can run many
in one batch. Forced tokens are read with the next pass; tokens that are forced through to the end are never read. A
backend that reads a few extra tokens cheaply also reads what may be written next (`lookahead`). The result is a whole
decision, or a `ModelError`. The decoder does not judge the decision.

`greedy` takes the likeliest permitted token at every choice point. `exact` takes at every choice the alternative whose
whole text, through its end, is the likeliest; `exact-kinds` does so for the kind only. Alternatives that can be listed
are read side by side on forks of the slot, in one pass; the same pass continues the one with the likeliest first token
with the text it forces. With lookahead, the pass before already does all of this. Wider numbers are searched
(`number_search`); where the search gives up, the likeliest digits are written.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from sds.decoding.errors import BACKEND_FAILED, LANGUAGE_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED, ambiguous
from sds.decoding.lookahead import Lookahead, LookaheadBudget, lookahead_alternatives, lookahead_tokens
from sds.decoding.number_search import Reader, likeliest_number
from sds.decoding.probabilities import (
    JOINT,
    ChoiceRecord,
    ChoiceScore,
    KnownLogits,
    Logits,
    Passing,
    Text,
    at_least,
    best_of,
    choice_record,
    continuations,
    log_mass,
    maximal_prefixes,
    permitted_shares,
    record_logp,
)
from sds.kernel.errors import ModelError, SdsError
from sds.models.protocol import ENDINGS, BackendError, Row
from sds.models.protocol import FORKS_MAX as FORKS_TOTAL

if TYPE_CHECKING:
    from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher
    from sds.models.protocol import Backend

ACTION_CHOICE = "action"
FORKS_MAX = 16
FORKS_MIN = 3  # one that holds what was decided, one that is read ahead, and one alternative at a time

Mode = Literal["greedy", "exact-kinds", "exact"]


@contextmanager
def as_model_error(reason_code: str, what: str) -> Iterator[None]:
    """Turn every exception of the block into a `ModelError` with this reason code. `what`: the failing part, for the message.

    A ModelError and the exceptions that end the process pass unchanged.
    """
    try:
        yield
    except (ModelError, *ENDINGS):
        raise
    except (SdsError, BackendError) as error:
        raise ModelError(str(error), reason_code=reason_code, hint=error.hint) from error
    except BaseException as error:
        raise ModelError(f"{what} failed unexpectedly", reason_code=reason_code) from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """A whole decision and how it came about.

    `confidence`: the share of the chosen action, 1.0 where only one was permitted. Where other requests in the batch may have
    moved it, the least it can be alone. `tokens_generated` includes forced tokens. `canonical`: the model's own tokenizer
    makes these tokens of `data`. `rows`: for each pass, this decision's tokens in it and the number of rows: its own here,
    replaced by the whole pass's where several decisions share passes. `grammar_sha256`: digest of the compiled grammar.
    """

    data: bytes
    choices: tuple[ChoiceRecord, ...]
    confidence: float
    tokens_prompt: int
    tokens_generated: int
    passes: int
    canonical: bool
    rows: tuple[tuple[int, int], ...]
    grammar_sha256: str


Deciding = Generator[list[Row], list[Logits], Decoded]
Choosing = Generator[list[Row], list[Logits], None]
Scoring = Generator[list[Row], list[Logits], NDArray[np.float64]]


def deciding(
    backend: Backend,
    slot: int,
    sections: Sequence[Sequence[int]],
    matcher: TokenMatcher,
    *,
    tokens_max: int,
    mode: Mode = "greedy",
    noise_logp_max: float = 0.0,
    forks_max: int = FORKS_MAX,
    shown: Sequence[str] = (),
) -> Deciding:
    """Decide once in `slot`: yield the rows of each pass, and be sent what `Backend.run` returns for them.

    `sections`: the prompt (`prompt_sections`). Before the first yield the slot is prefilled with all but the last,
    unless only one decision is possible. `noise_logp_max`: how far the other rows of a batch may move a
    log-probability; a choice that this could turn raises. `shown`: the numbers in the prompt (`numbers_shown`). At most
    `forks_max` (at least FORKS_MIN) forks are held at once, and none after the end or a close.

    Raises ModelError with the reason MASK_FAILED, BACKEND_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED or CHOICE_TOO_CLOSE.
    """
    run = _Run(backend, slot, sections, matcher, tokens_max, mode, noise_logp_max, max(forks_max, FORKS_MIN), shown)
    try:
        run.write([])
        if not matcher.finished:
            run.begin()
        while not matcher.finished:
            yield from run.read()
            yield from run.choose()
        return run.result()
    finally:
        run.drop(list(run.forks))


@dataclass
class _Run:
    """The state of one decision.

    `pending`: written tokens that the model has not read yet. `head`: the slot or fork whose KV cache holds all that
    was read. `logits`: those after that, shape [vocab_size].
    """

    backend: Backend
    slot: int
    sections: Sequence[Sequence[int]]
    matcher: TokenMatcher
    tokens_max: int
    mode: Mode
    noise_logp_max: float
    forks_max: int
    shown: Sequence[str]
    pending: list[int] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    logits: Logits = field(default_factory=lambda: np.zeros(0, np.float32))
    choices: list[ChoiceRecord] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    score: ChoiceScore | None = None
    action_tokens: int = 0  # how many log-probabilities the share of the action is made of
    by_digit: int | None = None  # start of a number that the search gave up: it is chosen token by token
    known: KnownLogits = field(default_factory=KnownLogits)

    def __post_init__(self) -> None:
        self.head = self.slot

    def write(self, tokens: Sequence[int]) -> None:
        """Write these tokens and all that they force. Raises ModelError."""
        with as_model_error(LANGUAGE_FAILED, "the language"):
            for token in tokens:
                self.matcher.accept(token)
            self.pending += [*tokens, *self.matcher.accept_forced()]
        if not self.matcher.finished:
            self._check_tokens(len(self.matcher.tokens))

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self.tokens_max:
            raise ModelError(
                f"the decision needs more than {self.tokens_max} tokens", reason_code=TOKEN_BUDGET_EXCEEDED
            )

    def begin(self) -> None:
        """Prefill the slot with the prompt but for its last section, which is read together with the first forced tokens."""
        with as_model_error(BACKEND_FAILED, "the model"):
            self.backend.prefill(self.sections[:-1], slot=self.slot)
        self.pending[:0] = self.sections[-1] if self.sections else []

    def read(self) -> Choosing:
        """Have the model read the pending tokens, unless the logits after them are known already."""
        if not self.pending or self.pending in self.known:
            return
        candidates = self._candidates()
        rows = [Row(self._fork(self.head), [*self.pending, *each.text], each.outputs) for each in candidates]
        found = yield from self._pass([Row(self.head, self.pending), *rows])
        self.logits, self.pending, self.known = found[0][-1], [], KnownLogits()
        for each, row, logits in zip(candidates, rows, found[1:], strict=True):
            self.known.record(each.text, row.slot, logits)

    def _candidates(self) -> list[Lookahead]:
        if not (tokens_max := self.backend.lookahead_tokens_max):
            return []
        forks_max = min(self.forks_max, FORKS_TOTAL // self.backend.slots) - len(self.forks)
        budget = LookaheadBudget(tokens_max, self.tokens_max - len(self.matcher.tokens), forks_max)
        with as_model_error(LANGUAGE_FAILED, "the language"):
            point = self.matcher.choice_point()
            if self._exact(point):
                found = lookahead_alternatives(
                    self.matcher, () if self.mode == "exact" else self.shown, self._following, budget
                )
            else:
                found = lookahead_tokens(self.matcher, point, self.shown, self._following, budget)
        again = len(self.pending) * (1 + len(found)) + sum(len(each.text) for each in found)
        return found if again <= self.backend.pass_tokens_max else []

    def choose(self) -> Choosing:
        with as_model_error(LANGUAGE_FAILED, "the language"):
            point = self.matcher.choice_point()
            exact = self._exact(point)
            whole = self.matcher.alternatives() if exact and point.finite else ()
        if exact and self.pending:
            raise ModelError("whole texts cannot be compared before the prompt is read", reason_code=LANGUAGE_FAILED)
        if whole:
            self._check_tokens(len(self.matcher.tokens) + max(len(text) for _, text in whole))
            yield from self._choose_whole(point, [label for label, _ in whole], [tuple(text) for _, text in whole])
        elif exact and point.labels and not point.finite and self.by_digit != point.start:
            yield from self._choose_number(point)
        else:
            self._choose_token(point)
            self._drop_others()

    def _exact(self, point: ChoicePoint) -> bool:
        return self.mode == "exact" or (self.mode == "exact-kinds" and point.choice == ACTION_CHOICE)

    def _choose_number(self, point: ChoicePoint) -> Choosing:
        reader = Reader(
            self.head, self.forks_max - len(self.forks), self._check_tokens, self._fork, self.drop, self._pass
        )
        with as_model_error(LANGUAGE_FAILED, "the language"):
            found = yield from likeliest_number(self.matcher, self.logits, reader, noise_logp_max=self.noise_logp_max)
        if found.close if found else self.noise_logp_max:  # with noise, the search might have ended in time
            raise ambiguous(point.choice)
        if found is None:
            self.by_digit = point.start
            self._choose_token(point)
        else:
            for step, token, self.logits in found.steps:
                self._choose_token(step, token)
            if found.slot is not None:
                self.head, self.pending = found.slot, self.pending[found.read :]
        self._drop_others()

    def _choose_token(self, point: ChoicePoint, taken: int | None = None) -> None:
        scores = self.logits[point.tokens].astype(np.float64) - log_mass(self.logits)
        best = self._best(point.choice, scores, None) if taken is None else point.tokens.tolist().index(taken)
        shares, z = permitted_shares(scores)
        if point.finite:
            self._count(point, shares.tolist(), best, z)
        elif point.labels:
            labels = [JOINT.join(labels) for labels in point.labels]
            name = f"{point.choice}[{max(0, len(self.matcher.data) - point.start)}]"
            self.choices.append(choice_record(name, labels, shares.tolist(), best, z))
        self.write([int(point.tokens[best])])
        self._follow()

    def _follow(self) -> None:
        """Where what was written has been read already, continue from its logits and its fork."""
        read = self.known.follow(self.pending)
        if read is not None:
            self.logits, held_by = read
            if held_by is not None:
                self.head, self.pending = held_by, []

    def _count(self, point: ChoicePoint, shares: list[float], best: int, z: float) -> None:
        if self.score is None:
            self.score = ChoiceScore(point.choice, point.start, [label for labels in point.labels for label in labels])
        if (self.score.name, self.score.start) != (point.choice, point.start):
            raise ModelError(
                "the language moved to another choice before this one was made", reason_code=LANGUAGE_FAILED
            )
        self.action_tokens += point.choice == ACTION_CHOICE
        record = self.score.add(point.labels, shares, best, z)
        if record is not None:
            self.choices.append(record)
            self.score = None

    def _choose_whole(self, point: ChoicePoint, labels: list[str], texts: list[Text]) -> Choosing:
        leader = int(np.array([self.logits[text[0]] for text in texts]).argmax())
        scores = yield from self._scores(texts, texts[leader])
        best = self._best(point.choice, scores, [len(text) for text in texts])
        self.action_tokens += max(map(len, texts)) if point.choice == ACTION_CHOICE else 0
        shares, z = permitted_shares(scores)
        self.choices.append(choice_record(point.choice, labels, shares.tolist(), best, z))
        self.write(texts[best])
        self._follow()
        self._drop_others()

    def _following(self, text: Text) -> tuple[Text, TokenMatcher]:
        """Return the text with what it forces, or () where the decision would then be whole; and the matcher after it."""
        with as_model_error(LANGUAGE_FAILED, "the language"):
            matcher = self.matcher.copy()
            for token in text:
                matcher.accept(token)
            forced = matcher.accept_forced()
            ends = matcher.finished or len(matcher.tokens) > self.tokens_max
            return (() if ends else (*text, *forced)), matcher

    def _scores(self, texts: Sequence[Text], leader: Text) -> Scoring:
        """Return the log-probability of each text, shape [len(texts)]. The same pass reads `leader` with what it forces.

        A text needs all but its last token read; texts that are prefixes of one another share a row. The rows go in
        waves, so that any number of texts needs a bounded number of forks.
        """
        following = continuations(texts)
        logp: dict[Text, float] = {}
        for read, logits in {(): self.logits, **self.known.logits}.items():
            record_logp(logp, following, read, logits)
        prefixes = maximal_prefixes(following)
        leader_text = self._following(leader)[0] if prefixes else ()
        for start in range(0, len(prefixes), self.forks_max - 2):
            wave = prefixes[start : start + self.forks_max - 2]
            rows = [Row(self._fork(self.head), tokens, len(tokens)) for tokens in wave]
            leader_rows = [Row(self._fork(self.head), leader_text)] if leader_text and not start else []
            found = yield from self._pass(rows + leader_rows)
            if leader_rows:
                self.known.record(leader_text, leader_rows[0].slot, found[-1])
            for tokens, logits in zip(wave, found, strict=False):
                for i in range(len(tokens)):
                    record_logp(logp, following, tokens[: i + 1], logits[i])
            self.drop([row.slot for row in rows])
        return np.array([sum(logp[text[: i + 1]] for i in range(len(text))) for text in texts])

    def _best(self, choice: str, scores: NDArray[np.float64], lengths: list[int] | None) -> int:
        best, close = best_of(scores, lengths, self.noise_logp_max)
        if close:
            raise ambiguous(choice)
        return best

    def _pass(self, rows: list[Row]) -> Passing:
        self.rows.append((sum(len(row.tokens) for row in rows), len(rows)))
        found = yield rows
        sound = len(found) == len(rows) and all(
            logits.shape == (row.outputs, self.backend.vocab_size) and np.isfinite(logits).all()
            for row, logits in zip(rows, found, strict=True)
        )
        if not sound:
            raise ModelError("the model returned values that are not logits", reason_code=LOGITS_INVALID)
        return found

    def _fork(self, slot: int) -> int:
        with as_model_error(BACKEND_FAILED, "the model"):
            self.forks.append(self.backend.fork(slot))
        return self.forks[-1]

    def _drop_others(self) -> None:
        kept = {self.head, *self.known.forks}
        self.drop([fork for fork in self.forks if fork not in kept])

    def drop(self, forks: Sequence[int]) -> None:
        for fork in reversed(forks):  # a fork goes before the one it was made from
            self.forks.remove(fork)
            with suppress(Exception):  # a backend that failed may hold none any more
                self.backend.drop(fork)

    def result(self) -> Decoded:
        if self.score is not None:
            raise ModelError("the language ended before a choice was made", reason_code=LANGUAGE_FAILED)
        data = bytes(self.matcher.data)
        with as_model_error(LANGUAGE_FAILED, "the language"):
            canonical = self.matcher.canonical()
        self._check_tokens(len(self.matcher.tokens))
        share = next((c.confidence for c in self.choices if c.name == ACTION_CHOICE), 1.0)
        return Decoded(
            data,
            tuple(self.choices),
            at_least(share, 2 * self.noise_logp_max * self.action_tokens),
            sum(map(len, self.sections)),
            len(self.matcher.tokens),
            len(self.rows),
            canonical,
            tuple(self.rows),
            self.matcher.grammar_sha256,
        )

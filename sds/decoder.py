"""One decision out of a language: greedy, masked, a forward pass only where the model really chooses.

Forced text rides with the next pass, and what is forced to the end costs none. At a choice the tokens are grouped by the
alternatives they leave open and the heaviest group is taken, so that no alternative wins by being spelled in more ways;
within the group the token is taken that the model's own tokenizer would write. It returns a whole decision or raises `ModelError`; it does not judge what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sds.grammars.mask import MASK_FAILED, Mask
from sds.kernel.errors import ModelError, SdsError
from sds.models.protocol import BackendError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sds.grammars.language import ChoiceView, Language
    from sds.models.protocol import Backend

BACKEND_FAILED = "BACKEND_FAILED"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
LOGITS_INVALID = "LOGITS_INVALID"
TOKEN_BUDGET_EXCEEDED = "TOKEN_BUDGET_EXCEEDED"  # noqa: S105 - a reason code, not a secret
ACTION_CHOICE = "action"
JOINT = "|"


@dataclass(frozen=True, slots=True)
class ChoiceTrace:
    """What the model thought of one choice.

    `probabilities`: (label, share among what was permitted), the options in the language's order, summing to 1; then
    those that were put aside together, before any token told them apart, as one entry `A|B`. `z`: the share of everything
    the model wanted to say that was permitted at all; small when it would rather have said something else.
    """

    name: str
    probabilities: tuple[tuple[str, float], ...]
    chosen: str
    z: float

    @property
    def confidence(self) -> float:
        return dict(self.probabilities)[self.chosen]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One forward pass: the bytes written before it, the token taken, how many were permitted, the share taken, Z.

    At a choice `probability` is that of all tokens that leave the same options open.
    """

    offset: int
    token: int
    permitted: int
    probability: float
    z: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """A whole decision and how it came about.

    `confidence`: the share of the chosen action, 1.0 where only one was permitted. `tokens_generated` counts forced ones
    too. `canonical`: the tokens are those the model's own tokenizer makes of `data`.
    """

    data: bytes
    choices: tuple[ChoiceTrace, ...]
    steps: tuple[StepTrace, ...]
    confidence: float
    tokens_prompt: int
    tokens_generated: int
    passes: int
    canonical: bool


def decode(
    backend: Backend,
    sections: Sequence[Sequence[int]],
    language: Language,
    *,
    tokens_max: int,
    now_ms: Callable[[], int],
    deadline_ms: int,
) -> Decoded:
    """Decide once. `sections`: the prompt (`prompt_sections`). `deadline_ms`: absolute, on the clock of `now_ms`.

    Raises ModelError with the reason MASK_FAILED, BACKEND_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED or
    DEADLINE_EXCEEDED; the deadline is looked at before and after every pass, a pass is never cut short.
    """
    with _stopping(MASK_FAILED, "the mask"):
        with _stopping(BACKEND_FAILED, "the model"):
            tokenizer = backend.grammar_tokenizer()
        run = _Run(backend, sections, language, Mask(tokenizer, language), tokens_max)
        run.write([])
        while not run.mask.finished:
            _in_time(now_ms, deadline_ms)
            run.choose()
        _in_time(now_ms, deadline_ms)
        return run.result()


@dataclass
class _Run:
    """One decision in the making. `pending`: written tokens that the model has not read yet."""

    backend: Backend
    sections: Sequence[Sequence[int]]
    language: Language
    mask: Mask
    tokens_max: int
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    steps: list[StepTrace] = field(default_factory=list)
    choices: list[ChoiceTrace] = field(default_factory=list)
    tally: _Tally | None = None

    def write(self, tokens: list[int]) -> None:
        """Take these tokens and all that they force."""
        self.mask.advance(tokens)
        forced = self.mask.forced()
        self.mask.advance(forced)
        written = tokens + forced
        self.tokens += written
        self.pending += written
        with _stopping(BACKEND_FAILED, "the model"):
            self.data += b"".join(map(self.backend.piece, written))
        if len(self.tokens) > self.tokens_max:
            raise ModelError(
                f"the decision needs more than {self.tokens_max} tokens", reason_code=TOKEN_BUDGET_EXCEEDED
            )

    def choose(self) -> None:
        ids = np.flatnonzero(self.mask.allowed())
        if len(ids) == 1:  # settled, though llguidance left its spelling open: no need to ask
            self.write([int(ids[0])])
            return
        shares, z = permitted_shares(self._logits(), ids)
        at, share = self._pick(ids, shares, z)
        self.steps.append(StepTrace(len(self.data), int(ids[at]), len(ids), share, z))
        self.write([int(ids[at])])

    def _logits(self) -> NDArray[np.float32]:
        with _stopping(BACKEND_FAILED, "the model"):
            if not self.steps:  # the last section rides with what is forced at the start
                self.backend.begin(self.sections[:-1])
                self.pending[:0] = self.sections[-1] if self.sections else []
            logits = self.backend.step(self.pending)
        self.pending = []
        if logits.shape != (self.backend.vocab_size,) or not np.isfinite(logits).all():
            raise ModelError("the model returned numbers that are no logits", reason_code=LOGITS_INVALID)
        return logits

    def _pick(self, ids: NDArray[np.intp], shares: NDArray[np.float64], z: float) -> tuple[int, float]:
        """Return the index into `ids` of the token to take, and the share of what it stands for."""
        data = bytes(self.data)
        tally = self._tally_at(data)
        if tally is None:
            at = int(shares.argmax())
            return at, float(shares[at])
        with _stopping(BACKEND_FAILED, "the model"):
            pieces = [self.backend.piece(int(token)) for token in ids]
            members, share = tally.take(data, pieces, shares, z)
            usual = self._usual_tokens(tally)
        return max(members, key=lambda at: (int(ids[at]) in usual, float(shares[at]))), share

    def _usual_tokens(self, tally: _Tally) -> set[int]:
        """Return the tokens that the model's own tokenizer would write next for an option that is still open."""
        written = len(self.tokens)
        whole = (self.backend.tokenize(text, special=False) for text in tally.spelled())
        return {tokens[written] for tokens in whole if tokens[:written] == self.tokens and len(tokens) > written}

    def _tally_at(self, data: bytes) -> _Tally | None:
        view = self.language.choices_at(data)
        if self.tally is not None and (view is None or (view.name, view.start) != self.tally.key):
            self._close(data)
        if self.tally is None and view is not None:
            self.tally = _Tally(view, data)
        return self.tally

    def _close(self, data: bytes) -> None:
        if self.tally is not None:
            self.choices.append(self.tally.trace(data))
            self.tally = None

    def result(self) -> Decoded:
        data = bytes(self.data)
        self._close(data)
        with _stopping(BACKEND_FAILED, "the model"):
            canonical = self.backend.tokenize(data, special=False) == self.tokens
        return Decoded(
            data,
            tuple(self.choices),
            tuple(self.steps),
            next((c.confidence for c in self.choices if c.name == ACTION_CHOICE), 1.0),
            sum(map(len, self.sections)),
            len(self.tokens),
            len(self.steps),
            canonical,
        )


class _Tally:
    """The probability of each option of one choice, gathered over the passes it takes.

    `reach`: the probability of what was written of it so far. Shares put aside on the way are measured, not estimated,
    and all sum to 1; where one group has several spellings, what follows is measured after the spelling taken.
    """

    def __init__(self, view: ChoiceView, data: bytes) -> None:
        self.key = (view.name, view.start)
        self._before = data[: view.start] + view.lead
        self._options = view.options
        self._reach = 1.0
        self._z = 1.0
        self._taken: tuple[str, ...] = ()
        self._shares: dict[tuple[str, ...], float] = {}

    def take(
        self, data: bytes, pieces: Sequence[bytes], shares: NDArray[np.float64], z: float
    ) -> tuple[list[int], float]:
        """Return the indices of the heaviest group and its mass; put the shares of the other groups aside."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, piece in enumerate(pieces):
            groups.setdefault(self._open(data + piece), []).append(index)
        if () in groups:
            raise _disagree()
        masses = {labels: float(shares[members].sum()) for labels, members in groups.items()}
        self._taken = max(masses, key=lambda labels: masses[labels])
        for labels, mass in masses.items():
            if labels != self._taken:
                self._shares[labels] = self._shares.get(labels, 0.0) + self._reach * mass
        self._reach *= masses[self._taken]
        self._z *= z
        return groups[self._taken], masses[self._taken]

    def spelled(self) -> list[bytes]:
        """Return everything from the first byte on, completed to each option of the group taken last."""
        return [self._before + text for label, text in self._options if label in self._taken]

    def trace(self, data: bytes) -> ChoiceTrace:
        labels = self._open(data)
        if len(labels) != 1:
            raise _disagree()
        self._shares[labels] = self._shares.get(labels, 0.0) + self._reach
        order = [label for label, _ in self._options]
        listed = sorted(self._shares, key=lambda labels: (len(labels), [order.index(label) for label in labels]))
        named = tuple((JOINT.join(labels), self._shares[labels]) for labels in listed)
        return ChoiceTrace(self.key[0], named, labels[0], self._z)

    def _open(self, data: bytes) -> tuple[str, ...]:
        """Return the options that `data` leaves open: it is a beginning of them, or they of it."""
        written = data[self.key[1] :]
        return tuple(label for label, text in self._options if text.startswith(written) or written.startswith(text))


def permitted_shares(logits: NDArray[np.float32], ids: NDArray[np.intp]) -> tuple[NDArray[np.float64], float]:
    """Return the softmax over the permitted `ids`, shape [len(ids)], and Z, their mass in the softmax over all."""
    exact = logits.astype(np.float64)
    permitted = exact[ids]
    weights = np.exp(permitted - permitted.max())
    z = np.exp(permitted - exact.max()).sum() / np.exp(exact - exact.max()).sum()
    return weights / weights.sum(), float(z)


@contextmanager
def _stopping(reason_code: str, what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `ModelError`: an exception never leaves a decision half constrained."""
    try:
        yield
    except ModelError:
        raise
    except (SdsError, BackendError) as error:
        raise ModelError(str(error), reason_code=reason_code, hint=error.hint) from error
    except Exception as error:
        raise ModelError(f"{what} failed unexpectedly", reason_code=reason_code) from error


def _in_time(now_ms: Callable[[], int], deadline_ms: int) -> None:
    if (late_ms := now_ms() - deadline_ms) > 0:
        raise ModelError(f"the decision is {late_ms} ms past its deadline", reason_code=DEADLINE_EXCEEDED)


def _disagree() -> ModelError:
    return ModelError("the mask and the language disagree on what may come next", reason_code=MASK_FAILED)

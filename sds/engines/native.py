"""A local model as the kernel's proposer: packet in, proposal bytes and what was measured out.

One model with one slot decides one packet at a time: calls queue, and equal packets give equal bits. With several slots
decisions share passes (`batching`); where the company they have shows in their scores, a choice that this could turn is
none: it raises. The language is proved alive before the first decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from sds.decoding.decoder import FORKS_MAX, FORKS_MIN, Deciding, Decoded, Mode, deciding, decode
from sds.decoding.errors import BACKEND_FAILED, TOKEN_BUDGET_EXCEEDED, stopping
from sds.decoding.lookahead import numbers_shown
from sds.engines.expressible import refuse_unsayable
from sds.engines.queueing import QueueTimeoutError, after_waiting
from sds.engines.scheduler import CLOSE_S_MAX, Scheduler
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import TokenMatcher
from sds.grammars.tokens.selftest import check_mask_constrains
from sds.grammars.tokens.text import TextTokens
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.errors import ModelError, UsageError
from sds.models.catalog.batch_variance import batch_variance
from sds.models.protocol import FORKS_MAX as BACKEND_FORKS_MAX
from sds.models.protocol import SLOTS_MAX, Backend, BackendError, Replicable, prompt_sections
from sds.models.tokenizer.tokenizer import Speaks
from sds.rationale.writing import Explaining, PriorityLock, explaining, lead_of, run_between

SLOTS_EXACT_MAX = BACKEND_FORKS_MAX // FORKS_MIN
TEXTS_MAX = 512  # of which the tokens are kept
COUNT_MS_MAX = 10_000  # to wait for the tokenizer where no packet's time runs yet


class NativeEngine:
    """Drives a backend. Raises ModelError when the model cannot be loaded or its language does not constrain.

    `noise_logp_max`: by how much company may move a log-probability; None: measure it now. `runtime`: what runs the
    model, for the record.
    """

    notices: tuple[str, ...] = ()  # what whoever opened it should know, a line each

    def __init__(
        self,
        backend: Backend,
        *,
        now_ms: Callable[[], int],
        mode: Mode = "greedy",
        noise_logp_max: float | None = None,
        runtime: Mapping[str, object] | None = None,
    ) -> None:
        check_slots(backend.slots, mode)
        self._backend, self._now_ms, self._mode = backend, now_ms, mode
        self._turns, self._words, self._closed = PriorityLock(), threading.Lock(), False
        self._text: TextTokens | None = None
        self._fits = set[str]()  # hashes of contracts
        with telling():
            check_mask_constrains(backend)
            self.notices = thinking_notices(backend)
            self._noise = batch_variance(backend) if noise_logp_max is None else noise_logp_max
        if not 0.0 <= self._noise < inf:  # less than none, or no number, would guard nothing
            raise ModelError(f"the noise of company is `{self._noise}`, no log-probability")
        self._compiler, self._runtime, self._known = GrammarCompiler(backend), runtime, _TokenizationCache(backend)
        self._facts = {
            **(runtime or {}),
            "weights": backend.fingerprint,
            "slots": backend.slots,
            "mode": mode,
            "noise_logp_max": self._noise,
        }
        self._batcher = Scheduler(backend, now_ms=now_ms, words=self._words) if backend.slots > 1 else None

    @property
    def model(self) -> str:
        """Name and first twelve digits of the SHA-256 of the weights: what the record calls the model."""
        return f"{self._backend.name}@{self._backend.fingerprint[:12]}"

    @property
    def slots(self) -> int:
        """How many decisions share its passes."""
        return self._backend.slots

    def check_contract(self, contract: Contract) -> None:
        with self._turn(self._now_ms() + COUNT_MS_MAX):
            if contract.hash not in self._fits and isinstance(self._backend, Speaks):
                refuse_unsayable(contract, self._backend, self.model)
            self._fits.add(contract.hash)

    def replica(self, *, threads: int) -> NativeEngine:
        """Return another engine over the same weights, of as many slots, for `threads` of its own. Raises ModelError, UsageError."""
        if not isinstance(self._backend, Replicable):
            raise UsageError(
                "replicas are for llama.cpp, OpenVINO and integer passes, on the processor",
                hint="use slots: they share passes",
            )
        with telling():
            backend = self._backend.replica(threads=threads, slots=self._backend.slots)
        how: dict[str, Any] = {"mode": self._mode, "runtime": self._runtime, "noise_logp_max": self._noise}
        try:
            return NativeEngine(backend, now_ms=self._now_ms, **how)
        except BaseException:
            backend.close()
            raise

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet within its expiry. Raises ModelError; never returns half a decision."""
        began = perf_counter()
        with self._turn(packet.expires_at_ms):
            sections = self._sections(packet)
            left = min(tokens_max, self._backend.context_tokens_max) - sum(map(len, sections))
            if left < 1:
                raise ModelError("the prompt leaves no token for a decision", reason_code=TOKEN_BUDGET_EXCEEDED)
            decoded = self._alone(packet, sections, left) if self._batcher is None else None
        decoded = decoded or self._in_company(packet, sections, left)
        return decoded.data, self._measured(decoded, sections, (perf_counter() - began) * 1000)

    def _alone(self, packet: DecisionPacket, sections: Sequence[Sequence[int]], tokens_max: int) -> Decoded:
        return decode(
            self._backend,
            sections,
            self._matcher(packet),
            tokens_max=tokens_max,
            now_ms=self._now_ms,
            deadline_ms=packet.expires_at_ms,
            mode=self._mode,
            noise_logp_max=self._noise,
            shown=numbers_shown(packet.texts),
        )

    def _in_company(self, packet: DecisionPacket, sections: Sequence[Sequence[int]], tokens_max: int) -> Decoded:
        def make(backend: Backend, slot: int) -> Deciding:
            return deciding(
                backend,
                slot,
                sections,
                self._matcher(packet),
                tokens_max=tokens_max,
                mode=self._mode,
                noise_logp_max=self._noise,
                forks_max=min(FORKS_MAX, BACKEND_FORKS_MAX // backend.slots),
                shown=numbers_shown(packet.texts),
            )

        assert self._batcher is not None  # noqa: S101  there are several slots
        pending = self._batcher.start(make, sections, packet.expires_at_ms)
        return replace(pending.result(), passes=len(pending.rows), rows=tuple(pending.rows))

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        """Say why `data` was decided. With one slot decisions go first, between its passes. Raises ModelError."""

        def left_s() -> float:
            return (deadline_ms - self._now_ms()) / 1000

        def make(backend: Backend, slot: int) -> Explaining:
            with stopping(BACKEND_FAILED, "the model"):
                backend.prefill(prefix, slot=slot)
            return (yield from explaining(told, text, chars_max, tokens_max=room, slot=slot))

        with telling(BACKEND_FAILED):
            with self._words if self._batcher else self._turns.between(left_s):
                self._check_open()
                *prefix, last = self._sections(packet)
                told = [*last, *self._backend.tokenize(lead_of(data), special=False)]
                text = self._text_tokens()
                room = self._backend.context_tokens_max - sum(map(len, prefix))
            if self._batcher is not None:
                return self._batcher.submit(make, [*prefix, told], deadline_ms)
            writing = explaining(told, text, chars_max, tokens_max=room)
            return run_between(writing, self._backend, prefix, self._turns, left_s=left_s, check=self._check_open)

    def _text_tokens(self) -> TextTokens:
        if self._text is None:  # a look at the whole vocabulary, for the first rationale only
            self._text = TextTokens(self._compiler.tokenizer_index)
        return self._text

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the engine is closed")

    def count_tokens(self, text: str) -> int:
        with self._turn(self._now_ms() + COUNT_MS_MAX), telling(BACKEND_FAILED):
            return len(self._backend.tokenize(text.encode(), special=False))

    @contextmanager
    def _turn(self, until_ms: float) -> Iterator[None]:
        """Keep others off the backend: all of it, or its tokenizer while the batcher's worker has it."""
        asked_ms = self._now_ms()
        wait_s = max(0.0, (until_ms - asked_ms) / 1000)
        if self._batcher is None:
            with self._turns.decision(wait_s), after_waiting(asked_ms, self._now_ms(), until_ms):
                yield
            return
        if not self._words.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
            raise QueueTimeoutError("the model's tokenizer was not free in time")
        try:
            yield
        finally:
            self._words.release()

    def _sections(self, packet: DecisionPacket) -> list[list[int]]:
        with telling():
            return prompt_sections(self._known, *packet.sections)

    def _matcher(self, packet: DecisionPacket) -> TokenMatcher:
        with telling():
            return self._compiler.matcher(packet.envelope, packet.snapshot.id)

    def _measured(self, decoded: Decoded, sections: Sequence[Sequence[int]], duration_ms: float) -> Decoding:
        if not decoded.passes:  # only one decision was possible: the model was not asked
            return Decoding(model=NOT_ASKED, duration_ms=duration_ms)
        return Decoding(
            model=self.model,
            confidence=decoded.confidence,
            alternatives=tuple(
                {"choice": c.name, "chosen": c.chosen, "z": c.z, "probabilities": dict(c.probabilities)}
                for c in decoded.choices
            ),
            tokens=decoded.tokens_prompt + decoded.tokens_generated,
            passes=decoded.passes,
            duration_ms=duration_ms,
            facts={
                **self._facts,
                "prompt": _digest(chain.from_iterable(sections)),
                "plan": decoded.grammar_sha256,
                "rows": decoded.rows,
                "canonical": decoded.canonical,
            },
        )

    def close(self) -> None:
        self._closed = True
        if self._batcher is not None:
            self._batcher.close()
            return
        with (
            suppress(QueueTimeoutError),
            self._turns.decision(CLOSE_S_MAX),
        ):  # else it keeps its model until the process ends
            self._backend.close()


def thinking_notices(model: object) -> tuple[str, ...]:
    """Return how the model is kept from thinking first, where its template has it do so; where it has no frame, nothing."""
    if not isinstance(model, Speaks):
        return ()
    with suppress(BackendError):
        return (how,) if (how := model.frame().thinking) else ()
    return ()


@contextmanager
def telling(reason_code: str = "") -> Iterator[None]:
    """Tell what a backend refuses as the project does."""
    try:
        yield
    except BackendError as error:
        raise ModelError(str(error), reason_code=reason_code, hint=error.hint) from error


class _TokenizationCache:
    """The tokens of texts, as the backend makes them: kept, for most of a prompt comes again and again."""

    def __init__(self, backend: Backend) -> None:
        self.frame = backend.frame
        self._tokens = lru_cache(TEXTS_MAX)(lambda text, special: tuple(backend.tokenize(text, special=special)))

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return list(self._tokens(text, special))


def _digest(tokens: Iterable[int]) -> str:
    """Return the SHA-256 of tokens as 32-bit little-endian numbers."""
    return sha256(np.fromiter(tokens, "<u4").tobytes()).hexdigest()


def check_slots(slots: int, mode: Mode) -> None:
    """Raise UsageError for what no backend can do."""
    most = SLOTS_MAX if mode == "greedy" else SLOTS_EXACT_MAX
    if not 1 <= slots <= most:
        raise UsageError(f"{slots} decisions at once are not between 1 and {most} in mode {mode}")

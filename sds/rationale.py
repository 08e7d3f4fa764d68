"""The rationale after the decision: the order is sent first, then the model writes why.

The engine that decided writes the rationale if it can, else its model does as a background task: it reads the prompt
and the decision, and writes greedily, within the alphabet and length of a rationale. One thread works through a bounded
queue. A rationale that does not fit, fails or is late is skipped and logged. The decision stands without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from sds.decoding.decoder import as_model_error
from sds.decoding.errors import BACKEND_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED
from sds.engines.protocol import Engine, Explains, Prompt, RunsBackground
from sds.engines.request import Passes
from sds.grammars.tokens.text import TextTokens
from sds.kernel.context.rationale import explain
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError, SdsError, UsageError
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.kernel import Kernel
from sds.models.protocol import ENDINGS, Row

QUEUE_MAX = 64
DRAIN_S_MAX = 5.0


def writer_of(engine: Engine) -> Explains:
    """Return the engine itself or a writer that uses its model. Raises UsageError where neither can write."""
    if isinstance(engine, Explains):
        return engine
    if isinstance(engine, RunsBackground):
        return RationaleWriter(engine)
    raise UsageError(
        f"the engine `{engine.model}` cannot write a rationale after the decision, but the contract asks for one",
        hint="use a native engine, not a chain, or `rationale: {order: before, ...}`",
    )


class RationaleWriter:
    """Writes rationales with the model of an engine. Safe in several threads."""

    def __init__(self, engine: RunsBackground) -> None:
        self._engine = engine
        self._text: TextTokens | None = None

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        r"""Return why `data` was decided: printable ASCII without `"` and `\`. Raises ModelError."""
        return self._engine.run_background(packet, _Writing(data, chars_max, self._tokens), deadline_ms=deadline_ms)

    def _tokens(self, prompt: Prompt) -> TextTokens:
        if self._text is None:  # goes through the whole vocabulary, so only for the first rationale
            self._text = TextTokens(prompt.index)
        return self._text


class _Writing:
    """One rationale being written. The text survives the loss of its slot: the next pass reads all of it again."""

    def __init__(self, data: bytes, chars_max: int, tokens_of: Callable[[Prompt], TextTokens]) -> None:
        self._lead, self._chars_max, self._tokens_of = lead_of(data), chars_max, tokens_of
        self._written, self._tokens = "", list[int]()

    def __call__(self, prompt: Prompt) -> Passes[str]:
        with as_model_error(BACKEND_FAILED, "the model"):
            *prefix, last = prompt.sections
            unread = [*last, *prompt.backend.tokenize(self._lead, special=False), *self._tokens]
            prompt.backend.prefill(prefix, slot=prompt.slot)
        left, text = prompt.backend.context_tokens_max - sum(map(len, prefix)), self._tokens_of(prompt)
        while True:
            left -= len(unread)
            if left < 0:  # checked before the pass, which would fail for every request in it
                raise ModelError(
                    "the model's context has no room for the whole rationale", reason_code=TOKEN_BUDGET_EXCEEDED
                )
            (logits,) = yield [Row(prompt.slot, unread)]
            ids = text.allowed(self._chars_max - len(self._written))
            if logits.shape[-1] <= ids.max() or not np.isfinite(logits).all():
                raise ModelError("the model returned values that are not logits", reason_code=LOGITS_INVALID)
            token = int(ids[logits.reshape(-1, logits.shape[-1])[-1][ids].argmax()])
            added, ended = text.read(token)
            if ended:
                return self._written
            self._written += added
            self._tokens.append(token)
            unread = [token]


def lead_of(data: bytes) -> bytes:
    """Return the decision as the model reads it again, up to the text it is to write. The reference, a hash, is left out."""
    return data.rpartition(b',"context_ref":')[0] + b',"rationale":"'


class Rationales:
    """Writes and records rationales in a thread of its own, in the order of the decisions. Safe in several threads."""

    def __init__(self, kernel: Kernel, writer: Explains, *, now_ms: Callable[[], int], log: Log) -> None:
        self._kernel, self._writer, self._now_ms, self._log = kernel, writer, now_ms, log
        self._jobs: deque[tuple[DecisionPacket, bytes]] = deque()
        self._lock = threading.RLock()  # entered instead of the condition: see `kernel.locks`
        self._changed = threading.Condition(self._lock)
        self._recording = threading.Lock()
        self._closed = self._abandoned = False
        self._worker: threading.Thread | None = None

    def ask(self, packet: DecisionPacket, data: bytes) -> None:
        """Queue a rationale of this decision, or skip it. Never waits."""
        with self._lock:
            why = "CLOSED" if self._closed else "QUEUE_FULL" if len(self._jobs) >= QUEUE_MAX else self._start()
            if not why:
                self._jobs.append((packet, data))
                self._changed.notify()
        if why:
            self._skip(packet, why)

    def close(self, drain_s: float = DRAIN_S_MAX) -> None:
        """Take no more; write what waits for at most `drain_s` seconds, then skip the rest."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        if self._worker is not None:
            self._worker.join(drain_s)
        with self._recording:  # from here on nothing is recorded, and the store may be closed
            self._abandoned = True
        while (job := self._next(wait=False)) is not None:
            self._skip(job[0], "CLOSED")

    def _start(self) -> str:
        """Start the worker unless it runs; return the reason for skipping where it cannot start, else ""."""
        if self._worker is None:  # a daemon, so that an engine that hangs does not keep the process alive
            worker = threading.Thread(target=self._work, name="sds-rationales", daemon=True)
            try:
                worker.start()
            except RuntimeError:  # the machine is out of threads
                return "NO_THREAD"
            self._worker = worker
        return ""

    def _work(self) -> None:
        while (job := self._next(wait=True)) is not None:
            self._write(*job)

    def _next(self, *, wait: bool) -> tuple[DecisionPacket, bytes] | None:
        with self._lock:
            if wait:
                self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None

    def _write(self, packet: DecisionPacket, data: bytes) -> None:
        contract = self._kernel.contract
        deadline_ms = self._now_ms() + contract.budget.ttl_ms
        try:
            text = self._writer.explain(packet, data, chars_max=contract.explanation_chars_max, deadline_ms=deadline_ms)
            with self._recording:
                if not self._abandoned:
                    explain(self._kernel.store, contract, packet.dfid, text, now_ms=self._now_ms())
                    self._log("rationale.recorded", {"dfid": packet.dfid})
                    return
            self._skip(packet, "CLOSED")
        except SdsError as error:
            self._skip(packet, error.reason_code)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  an engine may fail in any way; the decision stands
            self._skip(packet, type(error).__name__)

    def _skip(self, packet: DecisionPacket, why: str) -> None:
        self._log("rationale.skipped", {"dfid": packet.dfid, "reason": why})

"""Writes a rationale with the model that decided: it reads what it read and what it decided, and says why.

Greedy, in the alphabet and length of a rationale, as a background task of the engine: decisions go first, and the text goes
on when nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sds.decoding.errors import BACKEND_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED, as_model_error
from sds.engines.background import Prompt, RunsBackground
from sds.engines.protocol import Engine, Explains
from sds.engines.request import Passes
from sds.grammars.tokens.text import TextTokens
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError, UsageError
from sds.models.protocol import Row


def writer_of(engine: Engine) -> Explains:
    """Return what writes rationales: the engine itself, or its model. Raises UsageError where neither can."""
    if isinstance(engine, Explains):
        return engine
    if isinstance(engine, RunsBackground):
        return RationaleWriter(engine)
    raise UsageError(
        f"the engine `{engine.model}` writes no rationale after the decision, and the contract asks for one",
        hint="use a native engine alone, or `rationale: {order: before, ...}`",
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
        if self._text is None:  # a look at the whole vocabulary, for the first rationale only
            self._text = TextTokens(prompt.index)
        return self._text


class _Writing:
    """One text in the making. What is written outlasts the slot: it is read again in one pass."""

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
            if left < 0:  # no pass is to find that out: it would fail for all in it
                raise ModelError("there is no room for the whole rationale", reason_code=TOKEN_BUDGET_EXCEEDED)
            (logits,) = yield [Row(prompt.slot, unread)]
            ids = text.allowed(self._chars_max - len(self._written))
            if logits.shape[-1] <= ids.max() or not np.isfinite(logits).all():
                raise ModelError("the model returned numbers that are no logits", reason_code=LOGITS_INVALID)
            token = int(ids[logits.reshape(-1, logits.shape[-1])[-1][ids].argmax()])
            added, ended = text.read(token)
            if ended:
                return self._written
            self._written += added
            self._tokens.append(token)
            unread = [token]


def lead_of(data: bytes) -> bytes:
    """Return the decision as the model is shown it again, up to the text it is to write; its reference is a hash."""
    return data.rpartition(b',"context_ref":')[0] + b',"rationale":"'

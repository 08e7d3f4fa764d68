"""Any writer as the kernel's proposer: the envelope's language in the form the writer takes, its bytes as they come.

Nothing is measured: no confidence, no alternatives, and never a second pass to guess them. Whether the bytes are in the
language is the kernel's question. What is asked here, at start-up, is whether the writer is constrained at all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from time import perf_counter

from sds.decoding.errors import BACKEND_FAILED, DEADLINE_EXCEEDED, TOKEN_BUDGET_EXCEEDED
from sds.engines.expressible import refuse_unsayable
from sds.engines.native import thinking_notices
from sds.engines.queueing import QueueTimeoutError, after_waiting
from sds.grammars.emit import gbnf, json_schema
from sds.grammars.language import Choice, Language, Literal, Node, Number, Text, language
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.envelope.envelope import envelope_of, format_literal
from sds.kernel.envelope.proposal import PROPOSAL_BYTES_MAX
from sds.kernel.errors import ModelError
from sds.models.protocol import BackendError
from sds.models.text.protocol import Completion, Form, Grammar, TextModel
from sds.models.tokenizer.tokenizer import Speaks

PROOF_TIMEOUT_MS = 60_000  # includes what a library compiles on first use
END_TOKENS = 8  # beyond the sentence itself: what a model says to end its turn
_PROOF_TEXTS = ("You are a friendly assistant.", "Please say hello.")


class TextEngine:
    """Drives a writer; calls queue. Raises ModelError when the writer is not constrained."""

    def __init__(
        self,
        name: str,
        writer: TextModel,
        *,
        nonce: Callable[[], str],
        now_ms: Callable[[], int],
        proof_timeout_ms: int = PROOF_TIMEOUT_MS,
    ) -> None:
        """`nonce`: returns 64 hexadecimal digits no model could guess, others for each proof."""
        self._name, self._writer, self._nonce, self._now_ms = name, writer, nonce, now_ms
        self._lock = threading.Lock()
        self._fits = set[str]()  # hashes of contracts
        self.notices = thinking_notices(writer)
        self.prove(self._now_ms() + proof_timeout_ms)

    @property
    def model(self) -> str:
        return f"{self._name}/{self._writer.name}"

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where the model is here and `sds models check` says no of it; a server's words are out of reach."""
        with self._lock:
            if contract.hash not in self._fits and isinstance(self._writer, Speaks):
                refuse_unsayable(contract, self._writer, self.model)
            self._fits.add(contract.hash)

    def prove(self, deadline_ms: int) -> None:
        """Ask for a sentence the model would never say, under a grammar that permits nothing else.

        Raises ModelError unless exactly that comes back.
        """
        only = language(envelope_of([]), self._nonce())  # a new one: a gateway may keep answers
        expected = _one_sentence(only)
        if expected is None:
            raise ModelError("the proof of the mask is no single sentence", reason_code=BACKEND_FAILED)
        grammar = grammar_of(only, self._writer.form)
        texts = (_PROOF_TEXTS[0], _PROOF_TEXTS[1] + _form_hint(only, self._writer.form))
        needed = sum(map(self._writer.count_tokens, texts)) + grammar.bytes_max + END_TOKENS
        found = self._write(texts, grammar, needed, deadline_ms)
        if found.data != expected:
            hint = "the server ignores the grammar it is sent; another kind of engine or a newer server may not"
            raise ModelError(
                f"the engine `{self._name}` does not constrain its model", reason_code="MASK_FAILED", hint=hint
            )

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Return what was written, at most PROPOSAL_BYTES_MAX and one byte more. Raises ModelError."""
        began = perf_counter()
        said = language(packet.envelope, packet.snapshot.id)
        if (sentence := _one_sentence(said)) is not None:
            return sentence, Decoding(model=NOT_ASKED, duration_ms=(perf_counter() - began) * 1000)
        system, *texts = packet.texts
        grammar = grammar_of(said, self._writer.form)
        user = f"{''.join(texts)}{_form_hint(said, self._writer.form)}"
        found = self._write((system, user), grammar, tokens_max, packet.expires_at_ms)
        measured = Decoding(
            model=self.model,
            alternatives=None,
            tokens=found.tokens,
            passes=1,
            duration_ms=(perf_counter() - began) * 1000,
        )
        return found.data[: PROPOSAL_BYTES_MAX + 1], measured

    def count_tokens(self, text: str) -> int:
        return self._writer.count_tokens(text)

    def close(self) -> None:
        with self._lock:
            self._writer.close()

    def _write(self, texts: tuple[str, str], grammar: Grammar, tokens_max: int, deadline_ms: int) -> Completion:
        """Ask once there is a turn; raise ModelError, with the reason whether it was for want of time."""
        asked_ms = self._now_ms()
        if not self._lock.acquire(timeout=max(0.0, self._left_s(deadline_ms))):
            raise QueueTimeoutError(f"{self._name}: another decision holds the engine")
        with after_waiting(asked_ms, self._now_ms(), deadline_ms):
            try:
                budget = tokens_max - sum(map(self._writer.count_tokens, texts))
                if budget <= 0:
                    raise ModelError(
                        f"the prompt alone needs more than {tokens_max} tokens", reason_code=TOKEN_BUDGET_EXCEEDED
                    )
                room, left_s = min(budget, grammar.bytes_max + END_TOKENS), self._left_s(deadline_ms)
                return self._writer.write(*texts, grammar, tokens_max=room, timeout_s=left_s)
            except BackendError as error:
                late = self._left_s(deadline_ms) <= 0
                code = DEADLINE_EXCEEDED if late else BACKEND_FAILED
                raise ModelError(f"{self._name}: {error}", reason_code=code, hint=error.hint) from error
            finally:
                self._lock.release()

    def _left_s(self, deadline_ms: int) -> float:
        return (deadline_ms - self._now_ms()) / 1000


def grammar_of(said: Language, form: Form) -> Grammar:
    """Return a language as a grammar. Raises LanguageError where the form cannot say it within the limits."""
    texts: dict[Form, Callable[[Language], str]] = {
        "regex": Language.regex,
        "gbnf": gbnf.to_gbnf,
        "json_schema": lambda found: json.dumps(json_schema.emit(found)),
    }
    return Grammar(form, texts[form](said), _bytes_max(said.root), said.envelope.rationale_chars_max)


def _one_sentence(said: Language) -> bytes | None:
    only = said.root[0] if len(said.root) == 1 else None
    return only.text if isinstance(only, Literal) else None


def _bytes_max(nodes: tuple[Node, ...]) -> int:
    return sum(map(_node_bytes_max, nodes))


def _node_bytes_max(node: Node) -> int:
    if isinstance(node, Literal):
        return len(node.text)
    if isinstance(node, Choice):
        return max(_bytes_max(option.then) for option in node.options)
    if isinstance(node, Number):
        return max(len(format_literal(end, node.bound.scale)) for end in (node.bound.lo, node.bound.hi))
    if isinstance(node, Text):
        return node.chars_max
    raise TypeError(node)


def _form_hint(said: Language, form: Form) -> str:
    """A schema fixes values, not bytes: where that is all a server takes, the prompt says how they are written."""
    if form != "json_schema":
        return ""
    params = "params where the action has any, " if any(kind.params for kind in said.envelope.kinds) else ""
    fields = f"action, {params}reason, context_ref"
    shown = f"rationale, {fields}" if said.envelope.rationale_chars_max else fields
    return f"\nAnswer with one line of JSON without spaces, in this order: {shown}."

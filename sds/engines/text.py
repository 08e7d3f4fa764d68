"""Any text model as an engine: it gets the envelope's language in the form it takes, and its bytes are passed on unchanged.

Nothing is measured: there is no confidence, there are no alternatives, and no second pass guesses them. The kernel
checks whether the bytes are in the language. This engine checks, at the start, whether the model is constrained at all.
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
from sds.kernel.locks import acquired
from sds.models.protocol import BackendError
from sds.models.text.protocol import Completion, Form, Grammar, TextModel
from sds.models.tokenizer.tokenizer import Speaks

PROOF_TIMEOUT_MS = 60_000  # includes what a library compiles on first use
END_TOKENS = 8  # beyond the sentence itself: how a model ends its turn
_PROOF_TEXTS = ("You are a friendly assistant.", "Please say hello.")


class TextEngine:
    """Drives a text model; calls queue. Raises ModelError when the model is not constrained."""

    def __init__(
        self,
        name: str,
        writer: TextModel,
        *,
        nonce: Callable[[], str],
        now_ms: Callable[[], int],
        proof_timeout_ms: int = PROOF_TIMEOUT_MS,
    ) -> None:
        """`nonce`: returns 64 hexadecimal digits that no model could guess, new ones for each proof."""
        self._name, self._writer, self._nonce, self._now_ms = name, writer, nonce, now_ms
        self._lock = threading.RLock()
        self._fits = set[str]()  # hashes of contracts
        self.notices = thinking_notices(writer)
        self.prove(self._now_ms() + proof_timeout_ms)

    @property
    def model(self) -> str:
        return f"{self._name}/{self._writer.name}"

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where `sds models check` refuses a model that is here; a server's vocabulary is out of reach."""
        with self._lock:
            if contract.hash not in self._fits and isinstance(self._writer, Speaks):
                refuse_unsayable(contract, self._writer, self.model)
            self._fits.add(contract.hash)

    def prove(self, deadline_ms: int) -> None:
        """Ask for a sentence that the model would never say, under a grammar that permits nothing else.

        Raises ModelError unless exactly that sentence comes back.
        """
        only = language(envelope_of([]), self._nonce())  # a new sentence each time: a gateway may cache answers
        expected = _one_sentence(only)
        if expected is None:
            raise ModelError("the test of the mask has no single sentence", reason_code=BACKEND_FAILED)
        grammar = grammar_of(only, self._writer.form)
        texts = (_PROOF_TEXTS[0], _PROOF_TEXTS[1] + _form_hint(only, self._writer.form))
        needed = sum(map(self._writer.count_tokens, texts)) + grammar.bytes_max + END_TOKENS
        completion = self._write(texts, grammar, needed, deadline_ms)
        if completion.data != expected:
            hint = "the grammar is ignored: try another kind of engine, or a newer version of the server"
            raise ModelError(
                f"the engine `{self._name}` does not constrain its model", reason_code="MASK_FAILED", hint=hint
            )

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Return what the model wrote, cut after PROPOSAL_BYTES_MAX and one byte more. Raises ModelError."""
        began = perf_counter()
        target = language(packet.envelope, packet.snapshot.id)
        if (sentence := _one_sentence(target)) is not None:
            return sentence, Decoding(model=NOT_ASKED, duration_ms=(perf_counter() - began) * 1000)
        system, *texts = packet.texts
        grammar = grammar_of(target, self._writer.form)
        user = f"{''.join(texts)}{_form_hint(target, self._writer.form)}"
        completion = self._write((system, user), grammar, tokens_max, packet.expires_at_ms)
        measured = Decoding(
            model=self.model,
            alternatives=None,
            tokens=completion.tokens,
            passes=1,
            duration_ms=(perf_counter() - began) * 1000,
        )
        return completion.data[: PROPOSAL_BYTES_MAX + 1], measured

    def count_tokens(self, text: str) -> int:
        return self._writer.count_tokens(text)

    def close(self) -> None:
        with self._lock:
            self._writer.close()

    def _write(self, texts: tuple[str, str], grammar: Grammar, tokens_max: int, deadline_ms: int) -> Completion:
        """Ask the model once it is free. Raises QueueTimeoutError where it stays busy, ModelError for other failures."""
        asked_ms = self._now_ms()
        with acquired(self._lock, max(0.0, self._left_s(deadline_ms))) as free:
            if not free:
                raise QueueTimeoutError(f"{self._name}: the engine was busy with another decision")
            with after_waiting(asked_ms, self._now_ms(), deadline_ms):
                return self._write_at_once(texts, grammar, tokens_max, deadline_ms)

    def _write_at_once(self, texts: tuple[str, str], grammar: Grammar, tokens_max: int, deadline_ms: int) -> Completion:
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

    def _left_s(self, deadline_ms: int) -> float:
        return (deadline_ms - self._now_ms()) / 1000


def grammar_of(target: Language, form: Form) -> Grammar:
    """Return a language as a grammar. Raises LanguageError where the form cannot express it within the limits."""
    texts: dict[Form, Callable[[Language], str]] = {
        "regex": Language.regex,
        "gbnf": gbnf.to_gbnf,
        "json_schema": lambda completion: json.dumps(json_schema.emit(completion)),
    }
    return Grammar(form, texts[form](target), _bytes_max(target.root), target.envelope.rationale_chars_max)


def _one_sentence(target: Language) -> bytes | None:
    only = target.root[0] if len(target.root) == 1 else None
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


def _form_hint(target: Language, form: Form) -> str:
    """Return the prompt's words about form: a schema fixes the values but not the bytes, so the prompt must."""
    if form != "json_schema":
        return ""
    params = "params where the action has any, " if any(kind.params for kind in target.envelope.kinds) else ""
    fields = f"action, {params}reason, context_ref"
    shown = f"rationale, {fields}" if target.envelope.rationale_chars_max else fields
    return f"\nAnswer with one line of JSON without spaces, in this order: {shown}."

"""Can a contract's decisions be said in a model: every check says yes for a good model, and no for its own fault."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sds.engines.expressible import Question, check_model, question_of, widest_envelope
from sds.gates.refund.gate import load_refund_contract
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import DecisionEnvelope, meet
from sds.models.catalog.catalog import embedded_model
from sds.models.catalog.inspect import Inspected, inspect_model
from sds.models.tokenizer.tokenizer import Tokenizer
from tests.hostile import Vocabulary, tiny_checkpoint
from tests.scale import scale, seeded
from tests.small_models import sentencepiece_gguf

NAMES = ["model", "template", "bytes", "spelling", "mask", "decisions", "context", "evidence"]
CONTEXT_TOKENS = 4096


@contextmanager
def asked(path: Path, contract: Contract | None = None, context: int = CONTEXT_TOKENS) -> Iterator[Question]:
    with inspect_model(path) as model:
        yield question(model, contract, context)


def question(model: Inspected, contract: Contract | None = None, context: int = CONTEXT_TOKENS) -> Question:
    return question_of(contract or load_refund_contract(), model, context)


def refused(found: Question) -> dict[str, str]:
    return {check.name: check.reason for check in check_model(found) if not check.ok}


def with_rationale() -> Contract:
    """Return the terms of a model that says why first: it decides without a policy."""
    without = {"readings": {}, "policy": (), "max_error": None}
    return load_refund_contract().model_copy(update={"rationale": {"order": "before", "chars_max": 120}, **without})


@pytest.mark.parametrize("contract", [load_refund_contract(), with_rationale()], ids=["plain", "rationale"])
def test_the_embedded_model_can_say_every_decision(contract: Contract) -> None:
    with asked(embedded_model(), contract) as found:
        checks = check_model(found)
    assert [(name, True) for name in NAMES] == [(check.name, check.ok) for check in checks]


def test_a_checkpoint_folder_of_the_same_words_can_too(tiny_folder: Callable[[int], Path]) -> None:
    with asked(tiny_folder(1)) as found:
        assert {} == refused(found)


def test_every_kind_with_every_reason_is_among_the_samples() -> None:
    contract = load_refund_contract()
    with asked(embedded_model(), contract) as found:
        sentences = found.sentences
        matches = re.compile(found.said.regex().encode()).fullmatch
    assert all(map(matches, sentences))
    for name, kind in contract.kinds.items():
        for reason in kind.reasons:
            assert any(f'"{name}"'.encode() in s and f'"{reason}"'.encode() in s for s in sentences), (name, reason)


def test_no_snapshot_permits_more_than_the_widest_envelope() -> None:
    contract, rng = load_refund_contract(), seeded(20261123)
    rules, widest = Rules(contract), widest_envelope(contract)
    kinds = set[str]()
    for _ in range(scale(300, 20_000)):
        fields = {
            spec.path: rng.choice([True, False])
            if spec.kind.name == "bool"
            else rng.choice([*sorted(spec.kind.values), "x"][: len(spec.kind.values) or 1])
            if spec.kind.name == "string"
            else rng.randint(0, 10 ** rng.randrange(8))
            for spec in rules.fields
        }
        narrow = rules.envelope(fields)
        kinds |= {*narrow.names}
        assert bare(narrow) == meet(bare(narrow), widest)
    assert {"COMPENSATE", "DENY", "ESCALATE", "REFUND_TICKET", "VOUCHER"} == kinds


def bare(envelope: DecisionEnvelope) -> DecisionEnvelope:
    """Drop what the kernel fills in: no model says it."""
    return replace(envelope, kinds=tuple(replace(kind, fills=()) for kind in envelope.kinds))


def without(vocabulary: Vocabulary, byte: str) -> Vocabulary:
    """Return the same words, of which none is this byte alone."""
    words = copy.copy(vocabulary)
    tokens = ["\u0100gone" if token == byte else token for token in vocabulary.lists["tokens"]]
    words.lists = {**vocabulary.lists, "tokens": tokens}
    return words


def test_a_byte_that_no_token_spells_is_named(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with asked(tiny_checkpoint(tmp_path / "m.gguf", without(vocabulary, "_"), 1)) as found:
        reasons = refused(found)
    assert "1 of 57 bytes have no token of their own, first `_`" == reasons["bytes"]
    assert {"bytes", "spelling", "mask", "decisions"} == reasons.keys()


def test_a_rationale_needs_every_printable_byte(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tiny_checkpoint(tmp_path / "m.gguf", without(vocabulary, "~"), 1)
    with asked(path) as plain, asked(path, with_rationale()) as free:
        assert {} == refused(plain)
        assert "1 of 94 bytes have no token of their own, first `~`" == refused(free)["bytes"]


def test_words_that_put_a_space_before_every_text_can_say_all_the_same(tmp_path: Path) -> None:
    with asked(sentencepiece_gguf(tmp_path / "m.gguf"), with_rationale()) as found:
        assert {} == refused(found)


def test_a_context_that_is_too_short_says_by_how_much(tmp_path: Path) -> None:
    with asked(sentencepiece_gguf(tmp_path / "m.gguf", context=512)) as found:
        reason = refused(found)["context"]
    assert re.fullmatch(
        r"contract, fullest case and longest decision can need \d{4} tokens, but the context has 512", reason
    )


def test_a_budget_that_is_too_small_for_the_fullest_case_is_named() -> None:
    contract = load_refund_contract()
    poor = contract.model_copy(update={"budget": contract.budget.model_copy(update={"tokens_max": 600})})
    with asked(embedded_model(), poor) as found:
        assert re.fullmatch(r".* can need \d{4} tokens, but the contract's budget is 600", refused(found)["context"])


def test_the_fullest_case_counts_evidence_and_foreign_text() -> None:
    contract = load_refund_contract()
    longer = contract.model_copy(
        update={"event": contract.event.model_copy(update={"evidence_chars_max": 4000}), "show": ()}
    )
    with asked(embedded_model(), context=1600) as short, asked(embedded_model(), longer) as long:
        assert {} == refused(short)
        assert ["context"] == list(refused(long))


def test_the_fullest_case_is_told_with_the_longest_word_of_every_level() -> None:
    def needed(*words: str) -> int:
        first, second, third = words
        levels = {"flight.arr_delay_min": (first, 60, second, 180, third)}
        with asked(embedded_model(), load_refund_contract().model_copy(update={"levels": levels})) as found:
            (said,) = [check.reason for check in check_model(found) if check.name == "context"]
        return int(re.findall(r"\d+", said)[0])

    long = "late beyond all that is usual"
    assert needed("a", "b", "c") < needed(long, "b", "c") == needed("a", long, "c") == needed("a", "b", long)


def test_a_template_without_a_turn_is_a_no(tmp_path: Path, vocabulary: Vocabulary) -> None:
    words = copy.copy(vocabulary)
    words.chat_template = "nothing of yours"
    with asked(tiny_checkpoint(tmp_path / "m.gguf", words, 1)) as found:
        assert {"template": "the chat template does not show the system and the user text exactly once"} == refused(
            found
        )


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)


def test_how_the_model_is_kept_from_thinking_first_is_told(tmp_path: Path, vocabulary: Vocabulary) -> None:
    words = copy.copy(vocabulary)
    words.chat_template = THINKS
    with asked(tiny_checkpoint(tmp_path / "m.gguf", words, 1)) as found:
        reasons = {check.name: check.reason for check in check_model(found) if check.ok}
    assert "the model's own; the template's own `enable_thinking=False` turns thinking off" == reasons["template"]


def test_a_template_that_leaves_the_model_in_a_thought_is_a_no(tmp_path: Path, vocabulary: Vocabulary) -> None:
    words = copy.copy(vocabulary)
    words.chat_template = vocabulary.chat_template + "Here are my reasoning steps:\n"
    with asked(tiny_checkpoint(tmp_path / "m.gguf", words, 1)) as found:
        reason = refused(found)["template"]
    assert "the chat template makes the model think first, and does not show how a thought ends" == reason


def test_two_tokens_of_one_spelling_are_no_hindrance() -> None:
    """As in Baichuan's vocabulary: the tokenizer writes with the one, the other comes last."""
    with inspect_model(embedded_model()) as model:
        last = model.words.size - 1
        for byte in (b"0", b"D", b'"'):
            found = twisted(model, spell=lambda real, token, byte=byte: byte if token == last else real.spelling(token))
            assert {} == refused(found)


def test_turns_marked_by_plain_text_are_told(tmp_path: Path, vocabulary: Vocabulary) -> None:
    words = copy.copy(vocabulary)
    words.chat_template = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    with asked(tiny_checkpoint(tmp_path / "m.gguf", words, 1)) as found:
        reasons = {check.name: check.reason for check in check_model(found) if check.ok}
    assert reasons["evidence"].endswith("; turns are marked by plain text, which a claim can imitate")


@dataclass(frozen=True)
class Twisted:
    """The words of a real model, but for one thing."""

    real: Tokenizer
    encode_as: Callable[[Tokenizer, bytes], list[int]]
    spell_as: Callable[[Tokenizer, int], bytes]

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        return self.encode_as(self.real, text) if not special else self.real.encode(text, special=True)

    def spelling(self, token: int) -> bytes:
        return self.spell_as(self.real, token)


def twisted(
    model: Inspected,
    *,
    encode: Callable[[Tokenizer, bytes], list[int]] = lambda real, text: real.encode(text, special=False),
    spell: Callable[[Tokenizer, int], bytes] = lambda real, token: real.spelling(token),
) -> Question:
    return question(Inspected(model.card, Twisted(model.words, encode, spell)))  # type: ignore[arg-type]


def test_a_vocabulary_that_lets_a_claim_steer_is_a_no() -> None:
    with inspect_model(embedded_model()) as model:
        reasons = refused(twisted(model, encode=lambda real, text: [*real.encode(text, special=False), 2]))
    assert "a text cannot be told apart from the model's control tokens" == reasons["evidence"]


def test_a_vocabulary_that_loses_text_is_a_no() -> None:
    with inspect_model(embedded_model()) as model:
        reasons = refused(twisted(model, encode=lambda real, text: real.encode(text.lower(), special=False)))
    assert reasons["spelling"].startswith('`{"action":"COMPENSATE"')
    assert 'is reproduced as `{"action":"compensate"' in reasons["spelling"]


def test_a_vocabulary_that_raises_is_a_no_and_never_an_error() -> None:
    def broken(real: Tokenizer, token: int) -> bytes:
        raise ZeroDivisionError("not\nmine")

    with inspect_model(embedded_model()) as model:
        reasons = refused(twisted(model, spell=broken))
    assert dict.fromkeys(("bytes", "spelling", "mask", "decisions", "evidence"), "not mine") == reasons

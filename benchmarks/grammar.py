"""Measure what a new packet's bounds cost before its first token can be chosen: `sds bench grammar --json`.

Every repeat has new bounds and a new context reference. All engines are asked in turn, for the same decision in the same
run. Two figures each:

    first     from the bounds to the tokens permitted at the first choice (the kind of decision)
    decision  the same, and on through a refund with four free digits to its end: every set of permitted tokens

Ours starts from the envelope. The others start from the finished text of their grammar (the exact expression; for
`xgrammar` also GBNF), so writing that text does not count against them. Before the first figure each has seen another
packet of the same kind. That each permits all tokens that ours permits is checked, outside the timing.

Predicted before measuring: ours is one look-up under a key of about thirty strings and numbers, one copy of the forced
opening and one small array: 10 us; a whole decision asks ten viability questions of 1 us at each of eight digits:
200 us, most of it the spelling of the 64 digits of the context reference. llguidance parses and compiles an expression
of 1,000 characters: 1 ms. xgrammar compiles masks ahead for every state: some 10 ms. outlines-core runs the whole
vocabulary through the whole automaton: 100 ms or more. What ours must do at least is first timed bare (`predicted`): the
look-up, and a copy of every text and of every set of tokens that it hands out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sds.benchmarks.lib.measuring import (
    Parser,
    Report,
    Say,
    existing,
    machine,
    main,
    names,
    summary,
    timed_us,
    versions,
    whole_number,
)
from sds.grammars.emit import gbnf
from sds.grammars.language import Language, language
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, bound, envelope_of
from sds.models.catalog.catalog import embedded_model
from sds.models.catalog.inspect import inspect_model
from sds.models.tokenizer.tokenizer import ModelTokenizer, Tokenizer

N, N_MAX = 400, 100_000
BARE_N = 2_000
SLOW_EVERY = 40  # the slowest peer is asked in one of 40 repeats
SEED = 20261122
FORKS_MAX = 64
REFUND = "REFUND_TICKET"
MISSING = "not installed"
DISTS = {
    "llguidance": "llguidance",
    "xgrammar (GBNF)": "xgrammar",
    "xgrammar (regex)": "xgrammar",
    "outlines-core": "outlines-core",
}
Ids = NDArray[np.intp]
Script = list[tuple[list[int], int | None]]  # forced tokens, and the token chosen after them; None at the end


class MaskEngine(Protocol):
    """One engine. `text` makes the grammar for `begin`, untimed; `begin` prepares for one packet; `forward` accepts tokens;
    `permit` computes the next mask; `ids` returns the tokens it permits. It is asked in one of `every` repeats.
    """

    name: str
    every: int

    def text(self, said: Language) -> Any: ...

    def begin(self, text: Any) -> None: ...

    def forward(self, tokens: list[int]) -> None: ...

    def permit(self) -> None: ...

    def ids(self) -> Ids: ...


class Ours:
    name, every = "ours", 1

    def __init__(self, words: Tokenizer) -> None:
        self._compiler = GrammarCompiler(ModelTokenizer(words))

    def text(self, said: Language) -> tuple[DecisionEnvelope, str]:
        return said.envelope, said.context_ref

    def begin(self, text: tuple[DecisionEnvelope, str]) -> None:
        self._matcher = self._compiler.matcher(*text)

    def forward(self, tokens: list[int]) -> None:
        """Accept the chosen token, which comes first, if there is one. The matcher finds the forced ones itself."""
        if self._matcher.tokens:
            self._matcher.accept(tokens[0])
        self._matcher.accept_forced()

    def permit(self) -> None:
        self._choice_point = self._matcher.choice_point()

    def ids(self) -> Ids:
        return self._choice_point.tokens


class LlGuidance:
    name, every = "llguidance", 1

    def __init__(self, words: Tokenizer) -> None:
        from llguidance import LLMatcher  # noqa: PLC0415  needs an extra; only where it is measured

        from sds.benchmarks.peer.llguidance_tokenizer import llguidance_tokenizer  # noqa: PLC0415

        self._matcher_of, self._tokenizer, self._size = LLMatcher, llguidance_tokenizer(words), words.size

    def text(self, said: Language) -> str:
        return said.lark()

    def begin(self, text: str) -> None:
        self._matcher = self._matcher_of(self._tokenizer, self._matcher_of.grammar_from_lark(text), log_level=0)

    def forward(self, tokens: list[int]) -> None:
        if not self._matcher.consume_tokens(tokens):
            raise SystemExit(f"llguidance refused a token: {self._matcher.get_error()}")

    def permit(self) -> None:
        self._mask = self._matcher.compute_bitmask()

    def ids(self) -> Ids:
        return _ids(np.frombuffer(self._mask, dtype=np.uint8), self._size)


class XGrammar:
    every = 4

    def __init__(self, words: Tokenizer, *, form: str) -> None:
        import xgrammar  # noqa: PLC0415  loads torch; only where it is measured

        vocabulary = [words.spelling(token) for token in range(words.size)]
        tokens = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[words.eos])
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=os.cpu_count() or 1)
        self._matcher_of, self._size, self._form = xgrammar.GrammarMatcher, words.size, form
        self._mask = np.full((1, -(-words.size // 32)), -1, dtype=np.int32)
        self.name = f"xgrammar ({form})"

    def text(self, said: Language) -> str:
        return gbnf.to_gbnf(said) if self._form == "GBNF" else said.regex()

    def begin(self, text: str) -> None:
        make = self._compiler.compile_grammar if self._form == "GBNF" else self._compiler.compile_regex
        self._matcher = self._matcher_of(make(text))

    def forward(self, tokens: list[int]) -> None:
        if not all(map(self._matcher.accept_token, tokens)):
            raise SystemExit("xgrammar refused a token")

    def permit(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def ids(self) -> Ids:
        return _ids(self._mask.view(np.uint8)[0], self._size)


class OutlinesCore:
    name, every = "outlines-core", SLOW_EVERY

    def __init__(self, words: Tokenizer) -> None:
        outlines_core = import_module("outlines_core")  # only where it is measured; it has no types
        spelled: dict[bytes, list[int]] = {}
        for token in range(words.size):
            if not words.is_control(token):
                spelled.setdefault(words.spelling(token), []).append(token)
        self._vocabulary = outlines_core.Vocabulary(words.eos, spelled)
        self._index_of, self._guide_of, self._size = outlines_core.Index, outlines_core.Guide, words.size
        self._mask = np.full(-(-words.size // 32), -1, dtype=np.int32)

    def text(self, said: Language) -> str:
        return said.regex()

    def begin(self, text: str) -> None:
        self._guide = self._guide_of(self._index_of(text, self._vocabulary))

    def forward(self, tokens: list[int]) -> None:
        for token in tokens:
            self._guide.advance(token, return_tokens=False)

    def permit(self) -> None:
        self._guide.write_mask_into(self._mask.ctypes.data, self._mask.size, self._mask.itemsize)

    def ids(self) -> Ids:
        return _ids(self._mask.view(np.uint8), self._size)


def _ids(bits: NDArray[np.uint8], size: int) -> Ids:
    return np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))


PEERS: dict[str, Callable[[Tokenizer], MaskEngine]] = {
    "llguidance": LlGuidance,
    "xgrammar (GBNF)": lambda words: XGrammar(words, form="GBNF"),
    "xgrammar (regex)": lambda words: XGrammar(words, form="regex"),
    "outlines-core": OutlinesCore,
}


def packet(rng: Random) -> Language:
    """Return the language of a new packet: a refund of four or five digits, a voucher, and kinds without numbers."""
    fare, most = bound(1000, rng.randint(5000, 99_999), scale=2), rng.randint(3000, 90_000)
    voucher = bound(1000, most, step=500, scale=2)
    if fare is None or voucher is None:
        raise SystemExit("the benchmark's own bounds are empty")
    kinds = [
        KindBound(DENY, ("EXTRAORDINARY", "NOT_COVERED")),
        KindBound("COMPENSATE", ("CANCELLATION", "LONG_DELAY")),
        KindBound(REFUND, ("CANCELLATION", "LONG_DELAY"), (("amount", fare),)),
        KindBound("VOUCHER", ("DELAY",), (("amount", voucher),)),
    ]
    return language(envelope_of(kinds), f"{rng.getrandbits(256):064x}")


def script(compiler: GrammarCompiler, said: Language, rng: Random) -> tuple[Script, list[Ids]]:
    """Return the tokens of a refund of four digits, cut at the choice points, and the tokens permitted at each."""
    matcher, steps, permitted = compiler.matcher(said.envelope, said.context_ref), Script(), list[Ids]()
    chosen: int | None = None
    for _ in range(FORKS_MAX):
        lead = [] if chosen is None else [chosen]
        forced = lead + matcher.accept_forced()
        if matcher.finished:
            steps.append((forced, None))
            return steps, permitted
        point = matcher.choice_point()
        labels = [REFUND] if point.choice == "action" else rng.choice(point.labels[: 9 if point.finite else None])
        chosen = int(point.tokens[next(i for i, open_ in enumerate(point.labels) if labels[0] in open_)])
        matcher.accept(chosen)
        steps.append((forced, chosen))
        permitted.append(point.tokens)
    raise SystemExit("the benchmark's own decision does not end")


def ask(engine: MaskEngine, said: Language, steps: Script, permitted: list[Ids]) -> tuple[float, float]:
    """Return the microseconds to the first mask and through the whole decision. Raises SystemExit: a mask lacks tokens."""
    text = engine.text(said)
    began = time.perf_counter_ns()
    engine.begin(text)
    engine.forward(steps[0][0])
    engine.permit()
    first = decision = time.perf_counter_ns() - began
    for (tokens, _), wanted in zip(steps[1:], permitted, strict=True):
        if not np.isin(wanted, engine.ids()).all():
            raise SystemExit(f"{engine.name} permits fewer tokens than the language")
        began = time.perf_counter_ns()
        engine.forward(tokens)
        if tokens is not steps[-1][0]:
            engine.permit()
        decision += time.perf_counter_ns() - began
    return first / 1000, decision / 1000


def measure(engines: list[MaskEngine], words: Tokenizer, n: int) -> dict[str, list[tuple[float, float]]]:
    rng, compiler = Random(SEED), GrammarCompiler(ModelTokenizer(words))  # noqa: S311  a fixed choice, no secret
    found: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    for i in range(-1, n):  # the one before the first is for warming up
        said = packet(rng)
        steps, permitted = script(compiler, said, rng)
        for engine in engines:
            if i < 0 or i % engine.every == 0:
                times = ask(engine, said, steps, permitted)
                found[engine.name] += [times] if i >= 0 else []
    return found


def predicted(words: Tokenizer) -> dict[str, float]:
    """Return the least that ours can take, in microseconds: one look-up, and copies of what it hands out."""
    rng, compiler = Random(SEED), GrammarCompiler(ModelTokenizer(words))  # noqa: S311  a fixed choice, no secret
    said = packet(rng)
    steps, permitted = script(compiler, said, rng)
    key = (*said.envelope.kinds, said.context_ref)
    kept = {key: [tokens for tokens, _ in steps]}

    def copied(count: int) -> None:
        for tokens, ids in zip(kept[key][:count], permitted[:count], strict=False):
            tokens.copy()
            ids.copy()

    return {
        name: summary([timed_us(partial(copied, count)) for _ in range(BARE_N)])["p50"]
        for name, count in (("first_us", 1), ("decision_us", len(steps)))
    }


def run(n: int, model: Path, only: set[str], say: Say) -> Report:
    missing = {name: f"not installed: {dist}" for name, dist in DISTS.items() if versions(dist)[dist] == MISSING}
    wanted = [make for name, make in PEERS.items() if name not in missing and name in only]
    with inspect_model(model) as inspected:
        least = predicted(inspected.words)
        say(f"predicted for ours, in us: {least}")
        engines: list[MaskEngine] = [Ours(inspected.words), *(make(inspected.words) for make in wanted)]
        found = measure(engines, inspected.words, n)
    rows: list[dict[str, Any]] = [
        {"name": name, "first_us": summary([a for a, _ in times]), "decision_us": summary([b for _, b in times])}
        for name, times in found.items()
    ]
    first = {row["name"]: row["first_us"]["p50"] for row in rows}
    ours = next(row for row in rows if row["name"] == "ours")
    theirs = first.get("llguidance")
    return {
        "benchmark": "grammar",
        **machine(),
        "versions": versions("llguidance", "xgrammar", "outlines-core"),
        "n": n,
        "model": model.name,
        "predicted": least,
        "over_predicted": {name: round(ours[name]["p50"] / least[name], 1) for name in least},
        "ours_us_p50": first["ours"],
        "llguidance_us_p50": theirs,
        "speedup_over_llguidance": round(theirs / first["ours"], 1) if theirs else None,
        "rows": rows,
        "not_installed": missing,
    }


def _options(parser: Parser) -> None:
    every = list(PEERS)
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="packets")
    parser.add_argument("--only", type=names(every), default=every, help=f"peers, commas between: {', '.join(every)}")
    parser.add_argument("--model", type=existing, help="a GGUF file, for its words; left out: the embedded model")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    return run(asked.n, asked.model or embedded_model(), set(asked.only), say)


def _show(report: Report) -> None:
    for row in report["rows"]:
        print(f"{row['name']:<18} first {row['first_us']['p50']} us  decision {row['decision_us']['p50']} us")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)

"""How the kernel's verdict and writing a decision grow with a contract: kinds, reasons for each, fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sds.benchmarks.kernel import open_kernel, pure_verdict
from sds.benchmarks.lib.measuring import Say, summary, timed_us
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.tokenizer import Tokenizer
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope
from sds.kernel.envelope.state import StateRead
from sds.kernel.flow import intake

FORKS_MAX = 64
HI_MINOR = 50_000


class _Fields:
    """Every key has the same state: every field permits what its kind may spend."""

    def __init__(self, names: Sequence[str]) -> None:
        self._read = StateRead(dict.fromkeys(names, HI_MINOR), "1")

    def read(self, _key: str) -> StateRead | None:
        return self._read


def contract_of(kinds: int, reasons: int, fields: int) -> Contract:
    """Return a contract of `kinds` kinds, DENY among them; every other reads a field for its condition and its bound."""
    paths = _paths(fields)
    codes = tuple(f"CAUSE_{number}" for number in range(reasons))

    def kind(number: int) -> dict[str, Any]:
        path = paths[number % fields]
        return {"reasons": codes, "when": f"{path} > 0", "params": {"amount": {"lo": "1", "hi": path, "scale": 2}}}

    spec = {f"KIND_{number}": kind(number) for number in range(kinds - 1)} | {DENY: {"reasons": codes}}
    return Contract.model_validate(
        {
            "gate": "scaling",
            "agent_id": "scaling-agent",
            "version": "1.0.0",
            "owner": "bench@example",
            "effective_from": "2020-01-01",
            "mission": "Decide.",
            "authority": tuple(spec),
            "event": {"id": "claim_id", "key": "ticket_id"},
            "snapshot": dict.fromkeys(paths, "fixed(2)"),
            "kinds": spec,
        }
    )


def contracts(
    folder: Path, words: Tokenizer, sizes: Sequence[tuple[int, int, int]], n: int, say: Say
) -> list[dict[str, Any]]:
    """Return one row a size: the pure verdict, a decision in a compiled grammar, and one whose grammar must be compiled."""
    say(
        "contracts: predicted 8 us a kind for the verdict; a decision that does not grow; a grammar that grows with kinds x reasons"
    )
    return [_row(folder, words, size, n) for size in sizes]


def _row(folder: Path, words: Tokenizer, size: tuple[int, int, int], n: int) -> dict[str, Any]:
    kinds, reasons, fields = size
    name = f"{kinds}-{reasons}-{fields}"
    kernel = open_kernel(folder / f"{name}.db", contract=contract_of(*size), source=_Fields(_paths(fields)))
    packet = kernel.preview(intake.read_event(kernel.contract, {"claim_id": "A", "ticket_id": "T"}))
    compiler = GrammarCompiler(words)
    made_us = timed_us(lambda: written(compiler, packet.envelope, packet.snapshot.id))
    data = written(compiler, packet.envelope, packet.snapshot.id)
    writing = [timed_us(_writing(compiler, packet.envelope, number)) for number in range(n)]
    found = {
        "kinds": kinds,
        "reasons": reasons,
        "fields": fields,
        "verdict_us": pure_verdict(kernel, packet, data, n),
        "walk_us": summary(writing),
        "plan_ms": round(made_us / 1000, 2),
    }
    kernel.store.close()
    return found


def _writing(compiler: GrammarCompiler, envelope: DecisionEnvelope, number: int) -> Callable[[], bytes]:
    return lambda: written(compiler, envelope, f"{number:064x}")


def written(compiler: GrammarCompiler, envelope: DecisionEnvelope, context_ref: str) -> bytes:
    """Write one decision without a model: at every fork the last token that may come."""
    matcher = compiler.matcher(envelope, context_ref)
    for _ in range(FORKS_MAX):
        matcher.accept_forced()
        if matcher.finished:
            return matcher.data
        matcher.accept(int(matcher.choice_point().tokens[-1]))
    raise SystemExit("the benchmark's own decision does not end")


def _paths(fields: int) -> list[str]:
    return [f"state.field_{number}" for number in range(fields)]

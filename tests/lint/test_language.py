"""Whether a model can say and hold what a contract wants: its own tokenizer decides."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from sds.kernel.contract.schema import Contract
from sds.lint.finding import Finding
from sds.lint.language import language_findings, model_findings
from sds.lint.lint import lint
from sds.models.llamacpp.backend import LlamaBackend
from tests.kernel import world
from tests.model_fixtures import tiny, tiny_path, vocabulary

__all__ = ["tiny", "tiny_path", "vocabulary"]
DAYS = "days: {lo: 1, hi: 3}"


def rules(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.rule) for finding in found]


def about(backend: LlamaBackend, contract: Contract) -> list[Finding]:
    return model_findings(contract, lint(contract, Random(1), random_snapshots=50).reached, backend)


class Mute:
    """A model whose vocabulary has lost every token with an `O` in it."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def piece(self, token: int) -> bytes:
        piece = self._backend.piece(token)
        return b"" if b"O" in piece else piece


def test_a_model_says_everything_that_the_contract_permits(tiny: LlamaBackend) -> None:
    assert [] == about(tiny, world.contract())


def test_what_the_vocabulary_cannot_spell_is_named(tiny: LlamaBackend) -> None:
    found = about(Mute(tiny), world.contract())  # type: ignore[arg-type]  # a backend but for one method
    assert {("error", "cannot-be-said")} == set(rules(found))
    said = "\n".join(finding.message for finding in found)
    assert '{"action":"PAY","params":{"amount":0.01},"reason":"OWED"' in said
    assert '"LATE"' not in said
    assert ("kinds", "PAY", "reasons") in [finding.path for finding in found]


def test_a_step_without_a_short_language_is_an_error_with_its_snapshot() -> None:
    broken = world.contract((DAYS, "days: {lo: 1, hi: 900000000000, step: 7919}"))
    found = language_findings(broken, lint(broken, Random(1), random_snapshots=50).reached)
    assert ("error", "language-too-large") in rules(found)
    assert [("kinds", "TALK", "params", "days")] == [finding.path for finding in found]
    assert "`TALK` cannot be decided whatever the snapshot (proven by intervals)" in found[0].message
    mended = world.contract((DAYS, "days: {lo: 1, hi: 900000000000, step: 1000}"))
    assert [] == language_findings(mended, lint(mended, Random(1), random_snapshots=50).reached)


PAY = "amount: {lo: 1, hi: account.left, scale: 2}"
MOST = 10**15


def about_language(*edits: tuple[str, str]) -> list[Finding]:
    contract = world.contract(*edits)
    return language_findings(contract, lint(contract, Random(1), random_snapshots=50).reached)


@pytest.mark.parametrize("hi", ["account.left", f"{MOST}", f"'claim.due ? {MOST} : 5'"])
def test_what_only_some_snapshots_make_too_long_is_shown_on_one_and_not_called_proven(hi: str) -> None:
    """What is drawn or spent is narrowed by what is there: even a constant bound is not the one in force."""
    wide = (PAY, f"amount: {{lo: 1, hi: {hi}, scale: 2, step: 997}}")
    assert [] == about_language(wide)  # the limit of the day keeps it short
    [finding] = about_language(wide, ("max_minor: 100000", f"max_minor: {MOST}"))
    assert ("kinds", "PAY", "params", "amount") == finding.path
    assert "no language can be made when" in finding.message
    assert "an expression of more than 65536 characters" in finding.message
    assert "proven" not in finding.message
    assert finding.example is not None


def test_a_condition_that_the_kind_implies_is_part_of_the_proof() -> None:
    [finding] = about_language((DAYS, f"days: {{lo: 1, hi: 'claim.due ? {MOST} : 5', step: 997}}"))
    assert "proven by intervals" in finding.message


@pytest.mark.parametrize(
    ("tokens_max", "expected"),
    [(64, [("error", "prompt-too-long")]), (900, [("warning", "prompt-can-be-too-long")]), (4000, [])],
)
def test_the_prompt_must_fit_the_budget_of_a_flow(
    tiny: LlamaBackend, tokens_max: int, expected: list[tuple[str, str]]
) -> None:
    contract = world.contract(("kinds:", f"budget: {{tokens_max: {tokens_max}}}\nkinds:"))
    found = about(tiny, contract)
    assert expected == rules(found)
    assert all(("budget", "tokens_max") == finding.path for finding in found)


def test_the_prompt_must_fit_the_context_of_the_model(tiny: LlamaBackend) -> None:
    contract = world.contract(
        ("kinds:", "budget: {tokens_max: 100000}\nkinds:"),
        ("evidence: letter", "evidence: letter, evidence_chars_max: 4000"),
    )
    [finding] = about(tiny, contract)
    assert ("warning", "prompt-can-be-too-long", ("mission",)) == (finding.severity, finding.rule, finding.path)

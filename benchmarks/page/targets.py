"""The targets of the figures, whether they are reached, and where peers are quicker, computed from the documents."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure's target. `keys`: dotted path in the document; `limit`: such as `at most 5 ms`; `figure`: its name."""

    question: str
    keys: str
    limit: str
    figure: str

    def reached(self, value: float) -> bool:
        _, which, number, *_ = self.limit.split(" ")
        most = float(number.removesuffix("x"))
        return value <= most if which == "most" else value >= most


@dataclass(frozen=True, slots=True)
class Judged:
    """A target's result. `value`, `reached`: None where it was not measured."""

    value: float | None
    reached: bool | None

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "**missed**", None: "not measured"}[self.reached]


TARGETS = tuple(
    Target(question, keys, *of)
    for question, figures in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for keys, of in figures.items()
)


def judged(results: Results) -> list[tuple[Target, Judged]]:
    """Return every target with its result."""
    return [(target, _judged(target, results)) for target in TARGETS]


def _judged(target: Target, results: Results) -> Judged:
    value: Any = results.get(target.question)
    for key in target.keys.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _asked_for(target, results):
        return Judged(None, None)
    return Judged(value, target.reached(value))


def _asked_for(target: Target, results: Results) -> bool:
    """Tell whether a document can judge a target: scaling needs ledgers of about a thousand and of a million entries."""
    if target.question != "scaling":
        return True
    sizes = [row.get("entries", 0) for row in results["scaling"].get("ledger", [])]
    return bool(sizes) and min(sizes) < 2_000 and max(sizes) >= 1_000_000


def peers_wins(found: Mapping[str, Any]) -> Iterator[str]:
    for kind, key in (("fixed", "ms_p50"), ("digits", "digits_ms_p50")):
        for ours in (found["ours"], *found["ours_besides"]):
            for peer in found["peers"]:
                if None not in (peer[key], ours[key]) and peer[key] < ours[key]:
                    took = f"{peer['name']} takes {peer[key]} ms, {ours['name']} {ours[key]} ms"
                    yield f"One decision, {kind} packets: {took}."


def throughput_wins(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        ours, peer = row["ours"]["per_s"], row["peer"]["per_s"]
        if peer > ours:
            at_once = row["at_once"]
            yield f"{at_once} at once: {row['peer']['best']} makes {peer} decisions a second, ours {ours}."


def grammar_wins(found: Mapping[str, Any]) -> Iterator[str]:
    ours = {row["name"]: row for row in found["rows"]}["ours"]
    for what, key in (("to the first choice", "first_us"), ("through a whole decision", "decision_us")):
        for row in found["rows"]:
            if row[key]["p50"] < ours[key]["p50"]:
                yield f"New bounds, {what}: {row['name']} takes {row[key]['p50']} us, ours {ours[key]['p50']} us."


def kernel_wins(found: Mapping[str, Any]) -> Iterator[str]:
    for what, who, theirs, own in (
        ("One yes or no under one rule", "Cedar", "cedar_us", "rule_us"),
        ("One yes or no under one rule", "dir-core", "dir_core_verdict_us", "rule_us"),
        ("Drift check", "dir-core", "dir_core_jit_us", "jit_us"),
        ("A whole decision of the kernel", "dir-core", "dir_core_decided_us", "decided_us"),
    ):
        ours = found[own]["p50"]
        if theirs in found and found[theirs]["p50"] < ours:
            yield f"{what}: {who} takes {found[theirs]['p50']} us, ours {ours} us."


COMPARING: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "peers": peers_wins,
    "throughput": throughput_wins,
    "grammar": grammar_wins,
    "kernel": kernel_wins,
}

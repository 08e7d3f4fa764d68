"""What the figures must reach, whether they do, and where somebody else is the quicker one. All of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure in the document of a question, by the names on the way to it, and what it must be at most or at least."""

    figure: str
    question: str
    keys: str
    limit: str

    def reached(self, value: float) -> bool:
        _, which, number, *_ = self.limit.split(" ")
        most = float(number.removesuffix("x"))
        return value <= most if which == "most" else value >= most


@dataclass(frozen=True, slots=True)
class Judged:
    """`value`, `reached`: None where it was not measured."""

    value: float | None
    reached: bool | None

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "**missed**", None: "not measured"}[self.reached]


TARGETS = tuple(
    Target(figure, question, keys, limit)
    for question, of_question in {
        "hotpath": {
            "warm decision's reasoning over its bare passes": ("over_floor", "at most 1.1x"),
            "exact distribution over the kinds, against greedy": ("exact_over_greedy", "at most 1.3x"),
        },
        "readings": {
            "a reading of 60 tokens, median": ("reading_ms_p50", "at most 5 ms"),
            "a decision where the policy decides, median": ("decisions.DECIDED.whole_ms.p50", "at most 12 ms"),
        },
        "peers": {
            "fixed form, against the fastest peer": ("speedup_over_fastest", "at least 5x"),
            "four digits, against the fastest peer": ("speedup_digits", "at least 4x"),
            "fixed form, against the fastest peer, both without int8": (
                "speedup_over_fastest_same_type",
                "at least 5x",
            ),
            "four digits, against the fastest peer, both without int8": ("speedup_digits_same_type", "at least 4x"),
            "fixed form, against Outlines on llama.cpp": ("speedup_over_outlines_llamacpp", "at least 10x"),
            "four digits, against Outlines on llama.cpp": ("speedup_digits_over_outlines_llamacpp", "at least 10x"),
            "fixed form, against llama.cpp's grammar": ("speedup_over_llamacpp_grammar", "at least 10x"),
            "four digits, against llama.cpp's grammar": ("speedup_digits_over_llamacpp_grammar", "at least 10x"),
        },
        "grammar": {
            "new bounds, median": ("ours_us_p50", "at most 50 us"),
            "new bounds, against llguidance": ("speedup_over_llguidance", "at least 8x"),
        },
        "throughput": {"16 at once, against the best of the peers asked": ("speedup.16", "at least 6x")},
        "scaling": {"durable verdict, a million entries over a thousand": ("durable_1m_over_1k", "at most 1.2x")},
        "kernel": {
            "drift check, 99 of 100": ("jit_us_p99", "at most 5 us"),
            "pure verdict, median": ("verdict_us_p50", "at most 60 us"),
            "durable verdict over a bare commit": ("durable_over_commit_p50", "at most 5x"),
        },
    }.items()
    for figure, (keys, limit) in of_question.items()
)


def judged(results: Results) -> list[tuple[Target, Judged]]:
    """Return every target with what was measured of it."""
    return [(target, _judged(target, results)) for target in TARGETS]


def _judged(target: Target, results: Results) -> Judged:
    found: Any = results.get(target.question)
    for key in target.keys.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not _asked_for(target, results):
        return Judged(None, None)
    return Judged(found, target.reached(found))


def _asked_for(target: Target, results: Results) -> bool:
    """A ledger of other sizes says nothing of a million entries over a thousand."""
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

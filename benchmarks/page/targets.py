"""What the figures must reach, whether they do, and where somebody else is the quicker one. All of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure in the document of a question, by the names on the way to it; `most` or `least` is its limit."""

    figure: str
    question: str
    keys: tuple[str, ...]
    most: float | None = None
    least: float | None = None
    unit: str = ""

    @property
    def said(self) -> str:
        limit = self.most if self.least is None else self.least
        return f"at {'least' if self.most is None else 'most'} {limit:g}{self.unit}"

    def reached(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


@dataclass(frozen=True, slots=True)
class Judged:
    """`value`, `reached`: None where it was not measured."""

    value: float | None
    reached: bool | None

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "**missed**", None: "not measured"}[self.reached]


TARGETS = (
    Target("warm decision's reasoning over its bare passes", "hotpath", ("over_floor",), most=1.10, unit="x"),
    Target("exact distribution over the kinds, against greedy", "hotpath", ("exact_over_greedy",), most=1.3, unit="x"),
    Target("fixed form, against the fastest peer", "peers", ("speedup_over_fastest",), least=5, unit="x"),
    Target("four digits, against the fastest peer", "peers", ("speedup_digits",), least=4, unit="x"),
    Target(
        "fixed form, against the fastest peer, both without int8",
        "peers",
        ("speedup_over_fastest_same_type",),
        least=5,
        unit="x",
    ),
    Target(
        "four digits, against the fastest peer, both without int8",
        "peers",
        ("speedup_digits_same_type",),
        least=4,
        unit="x",
    ),
    Target(
        "fixed form, against Outlines on llama.cpp", "peers", ("speedup_over_outlines_llamacpp",), least=10, unit="x"
    ),
    Target(
        "four digits, against Outlines on llama.cpp",
        "peers",
        ("speedup_digits_over_outlines_llamacpp",),
        least=10,
        unit="x",
    ),
    Target("fixed form, against llama.cpp's grammar", "peers", ("speedup_over_llamacpp_grammar",), least=10, unit="x"),
    Target(
        "four digits, against llama.cpp's grammar",
        "peers",
        ("speedup_digits_over_llamacpp_grammar",),
        least=10,
        unit="x",
    ),
    Target("new bounds, median", "grammar", ("ours_us_p50",), most=50, unit=" us"),
    Target("new bounds, against llguidance", "grammar", ("speedup_over_llguidance",), least=8, unit="x"),
    Target("16 at once, against the best of the peers asked", "throughput", ("speedup", "16"), least=6, unit="x"),
    Target(
        "durable verdict, a million entries over a thousand", "scaling", ("durable_1m_over_1k",), most=1.2, unit="x"
    ),
    Target("drift check, 99 of 100", "kernel", ("jit_us_p99",), most=5, unit=" us"),
    Target("pure verdict, median", "kernel", ("verdict_us_p50",), most=60, unit=" us"),
    Target("durable verdict over a bare commit", "kernel", ("durable_over_commit_p50",), most=5, unit="x"),
)


def judged(results: Results) -> list[tuple[Target, Judged]]:
    """Return every target with what was measured of it."""
    return [(target, _judged(target, results)) for target in TARGETS]


def _judged(target: Target, results: Results) -> Judged:
    found: Any = results.get(target.question)
    for key in target.keys:
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
                    said = f"{peer['name']} takes {peer[key]} ms, {ours['name']} {ours[key]} ms"
                    yield f"One decision, {kind} packets: {said}."


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

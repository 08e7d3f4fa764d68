"""The sections of the report: what one question's document says, as Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sds.benchmarks import gpu, grammar, hotpath, kernel, peers, scaling, throughput
from sds.benchmarks.page.plots import Bar, bars

Report = Mapping[str, Any]
Section = tuple[str, dict[str, str]]
SUMMARY = ("n", "p50", "p95", "p99", "max")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; what is None is a dash."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value)) or "-"
    return " ".join(str(value).split()).replace("|", "\\|")


def _spread(found: Mapping[str, float] | None) -> list[object]:
    return [found[key] if found else None for key in SUMMARY]


def _said(module: Any) -> str:
    """Return the question's own words: what it asks, and what it predicted before it measured."""
    paragraphs = str(module.__doc__).strip().split("\n\n")[1:]
    return "\n\n".join(f"```\n{text}\n```" if text.startswith("    ") else text for text in paragraphs)


def of_hotpath(found: Report) -> Section:
    sorts = found["warm"]
    whole = [[sort, what, *_spread(of[key])] for sort, of in sorts.items() for key, what in _HOTPATH.items()]
    whole.append(["a denial", "cold: the first decision of a new engine", *_spread(found["cold_ms"])])
    keys = ("decisions", "over_floor", "whole_over_floor", "whole_over_predicted", "no_pass")
    exact = ("exact_over_greedy", "all_exact_over_greedy", "exact_differs")
    counts = ("tokens_of_passes", "kept", "canonical", "decided_otherwise")
    stages = list(next(iter(found["stages_ms"].values())))
    floors = ("memory_gb_per_s", "gop_per_s", "in", "weights_mb", "parameters_m", "tokens_of_passes", "floor_ms")
    parts = [
        "## `hotpath`: trigger to durable receipt",
        _said(hotpath),
        table(["decisions", "milliseconds", *SUMMARY], whole),
        *(
            table(["decisions", *of_them], [[s, *(of[key] for key in of_them)] for s, of in sorts.items()])
            for of_them in (keys, exact, counts)
        ),
        "Medians of the stages, in milliseconds:",
        table(["decisions", *stages], [[sort, *of.values()] for sort, of in found["stages_ms"].items()]),
        "Predicted from this machine's rates, for the passes of an earlier decision:",
        table(
            ["decisions", *floors], [[sort, *(of[key] for key in floors)] for sort, of in found["predicted"].items()]
        ),
    ]
    drawn = [Bar(stage, sort, ms) for sort, of in found["stages_ms"].items() for stage, ms in of.items()]
    return "\n\n".join(parts), {"report-stages.svg": bars("Stages of one decision, median ms", drawn)}


_HOTPATH = {"whole_ms": "trigger to receipt", "reason_ms": "reasoning", "bare_passes_ms": "its bare passes"}


def of_peers(found: Report) -> Section:
    every = [found["ours"], *found["ours_besides"], *found["peers"]]
    head = "engine | versions | fixed p50 | digits p50 | of refunds | compile p50 | violations | errors | same as ours | notes"
    keys = ("ms_p50", "digits_ms_p50", "digits_refund_ms_p50", "compile_ms_p50", "violations", "errors")
    rows = [
        [
            of["name"],
            of["version"],
            *(of[key] for key in keys),
            f"{of['same_as_ours']} fixed, {of['digits_same_as_ours']} digits",
            of["notes"] or None,
        ]
        for of in every
    ]
    spreads = [
        [of["name"], kind, *_spread(of[key])]
        for of in every
        for kind, key in (("fixed", "ms"), ("digits", "digits_ms"))
    ]
    decided = [[of["name"], of["decided"], of["digits_decided"]] for of in every]
    ratios = [[f"`{name}`", value] for name, value in found.items() if name.startswith("speedup")]
    predicted = [
        [kind, library, of["ours"], of["token_by_token"]]
        for kind, by_library in found["predicted_ms"].items()
        for library, of in by_library.items()
    ]
    parts = [
        "## `peers`: one decision, ours and theirs",
        _said(peers),
        (
            f"Milliseconds, {found['threads']} threads, at most {found['n']} packets of each kind; the words that recur had been "
            f"read for an earlier one in {found['recurring']['fixed']} fixed and {found['recurring']['digits']} digits. "
            f"In {found['amount_shown']} of the digits ones ours wrote an amount that the prompt shows."
        ),
        table(
            ["packets", "`chosen_from`", "`passes` of ours: decisions"],
            [[kind, found["chosen_from"][kind], found["passes"][kind]] for kind in found["chosen_from"]],
        ),
        table(head.split(" | "), rows),
        table(["ratio of the medians: the peer's time over ours", ""], ratios),
        "Predicted from bare passes of these shapes, before measuring, in milliseconds:",
        table(["packets", "in", "ours", "a pass for every token"], predicted),
        table(["engine", "packets", *SUMMARY], spreads),
        table(["engine", "decided, fixed", "decided, digits"], decided),
    ]
    drawn = [
        Bar(of["name"], kind, of[key])
        for of in every
        for kind, key in (("fixed", "ms_p50"), ("digits", "digits_ms_p50"))
    ]
    return "\n\n".join(parts), {"report-peers.svg": bars("One decision, median ms: shorter is better", drawn)}


def of_throughput(found: Report) -> Section:
    rows = [
        [
            at_once,
            of["ours"]["best"],
            of["ours"]["per_s"],
            found["predicted"]["per_s"][at_once],
            found["of_predicted"][at_once],
            of["peer"]["best"],
            of["peer"]["per_s"],
            found["speedup"][at_once],
            of["ours"]["became"],
            of["peer"]["became"],
        ]
        for of in found["rows"]
        for at_once in [str(of["at_once"])]
    ]
    tried = [
        [
            of["at_once"],
            who,
            name,
            way["per_s"],
            ", ".join(map(str, way.get("each_per_s", ()))) or None,
            way.get("became"),
            way.get("notes") or None,
        ]
        for of in found["rows"]
        for who, key in (("ours", "ours"), ("a peer", "peer"))
        for name, way in of[key]["tried"].items()
    ]
    head = "at once | ours, best with | a second | predicted, at most | of it | best peer | a second | ours over it | ours became | its became"
    floors = ("memory_gb_per_s", "gop_per_s", "in", "case_tokens")
    parts = [
        "## `throughput`: decisions a second",
        _said(throughput),
        table(head.split(" | "), rows),
        table(["at once", "", "as", "decisions a second", "each round", "became", "notes"], tried),
        "Predicted from this machine's rates:",
        table(list(floors), [[found["predicted"][key] for key in floors]]),
    ]
    drawn = [
        Bar(f"{of['at_once']} at once", who, of[key]["per_s"])
        for of in found["rows"]
        for who, key in (("ours", "ours"), ("best peer", "peer"))
    ]
    return "\n\n".join(parts), {"report-throughput.svg": bars("Decisions a second: longer is better", drawn)}


def of_grammar(found: Report) -> Section:
    what = {"first_us": "first", "decision_us": "decision"}
    rows = [[row["name"], said, *_spread(row[key])] for row in found["rows"] for key, said in what.items()]
    parts = ["## `grammar`: what new bounds cost", _said(grammar), "Microseconds:"]
    parts.append(table(["what", "figure", *SUMMARY], rows))
    parts.append(_predicted(found, what))
    if found["not_installed"]:
        parts.append(f"Not asked: {_cell(found['not_installed'])}.")
    return "\n\n".join(parts), {}


def _predicted(found: Report, names: Mapping[str, str]) -> str:
    """Return the table of what ours was predicted to take at least, and how many times as long it takes."""
    rows = [[names[key], least, found["over_predicted"][key]] for key, least in found["predicted"].items()]
    return table(["ours", "predicted, at least", "takes so many times that"], rows)


def of_kernel(found: Report) -> Section:
    rows = [[text, *_spread(found[key])] for key, text in kernel.ROWS.items() if key in found]
    parts = ["## `kernel`: what the kernel costs", _said(kernel), "Microseconds:", table(["what", *SUMMARY], rows)]
    if "cedar_us" not in found:
        parts.append("Not asked: Cedar, which is not installed.")
    if "not_asked" in found:
        parts.append(f"Not asked: {_cell(found['not_asked'])}.")
    parts += [_predicted(found, kernel.ROWS), kernel.READING]
    return "\n\n".join(parts), {}


def of_scaling(found: Report) -> Section:
    ledger = [[f"{row['entries']}", row["bytes"], *_spread(row["durable_us"])] for row in found["ledger"]]
    prompt = [
        [row["case_tokens"], row["tokens_of_passes"], row["predicted_ms"], *_spread(row["decision_ms"])]
        for row in found["prompt"]
    ]
    kinds = [
        [row["kinds"], mode, of["tokens_of_passes"], of["predicted_ms"], *_spread(of["decision_ms"])]
        for row in found["alternatives"]
        for mode, of in (("greedy", row["greedy"]), ("exact", row["exact"]))
    ]
    over = [[row["kinds"], row["exact_over_greedy"]] for row in found["alternatives"]]
    sized = [
        [row["kinds"], row["reasons"], row["fields"], what, *_spread(row[key])]
        for row in found["contract"]
        for what, key in (("verdict", "verdict_us"), ("walk", "walk_us"))
    ]
    plans = [[row["kinds"], row["reasons"], row["fields"], row["plan_ms"]] for row in found["contract"]]
    size = ["kinds", "reasons", "fields"]
    parts = [
        "## `scaling`: what costs grow with",
        _said(scaling),
        "The durable verdict in microseconds, by entries of the ledger:",
        table(["entries", "bytes", *SUMMARY], ledger),
        "A decision in milliseconds, by tokens of the case's own text:",
        table(["tokens", "tokens of the passes", "predicted", *SUMMARY], prompt),
        "A choice among kinds in milliseconds:",
        table(["kinds", "mode", "tokens of the passes", "predicted", *SUMMARY], kinds),
        table(["kinds", "exact over greedy"], over),
        "The pure verdict and a walk through the language, in microseconds, by size of the contract:",
        table([*size, "what", *SUMMARY], sized),
        "Its first walk, which makes the plan, in milliseconds:",
        table([*size, "plan"], plans),
    ]
    drawn = [Bar(f"{row['entries']} entries", "p50", row["durable_us"]["p50"]) for row in found["ledger"]]
    return "\n\n".join(parts), {"report-ledger.svg": bars("Durable verdict by ledger size, median us", drawn)}


def of_gpu(found: Report) -> Section:
    warm = [
        [sort, what, *_spread(of[key])]
        for sort, of in found["warm"].items()
        for key, what in (("reason_ms", "greedy"), ("bare_passes_ms", "its bare passes"), ("exact_ms", "exact"))
    ]
    keys = ("over_floor", "exact_over_greedy", "tokens_of_passes", "floor_ms")
    least = found["predicted"]
    per_s = [[at_once, rate, found["too_close"][at_once]] for at_once, rate in found["ours_per_s"].items()]
    rates = f"It copies {least['memory_gb_per_s']} GB/s, the weights are {least['weights_mb']} MB"
    parts = [
        "## `gpu`: on a card",
        _said(gpu),
        f"{found['device']}, {found['dtype']}. {rates}: no pass can be faster than {least['pass_ms']} ms.",
        table(["packets", "milliseconds", *SUMMARY], warm),
        table(["packets", *keys], [[sort, *(of[key] for key in keys)] for sort, of in found["warm"].items()]),
        table(["at once", "ours a second", "too close to call"], per_s),
    ]
    drawn = [Bar(f"{at_once} at once", "ours", rate) for at_once, rate in found["ours_per_s"].items()]
    return "\n\n".join(parts), {"report-gpu.svg": bars("Decisions a second on the card", drawn)}


SECTIONS: dict[str, Callable[[Report], Section]] = {
    "hotpath": of_hotpath,
    "peers": of_peers,
    "throughput": of_throughput,
    "grammar": of_grammar,
    "kernel": of_kernel,
    "scaling": of_scaling,
    "gpu": of_gpu,
}

"""Draw the page's plots as SVG with matplotlib: bars that begin at zero, each with its label and value."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure

from sds.benchmarks.lib.measuring import Report

WIDTH_IN, HEAD_IN, ROW_IN = 9.0, 0.8, 0.25
NO_DATE = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `series`: gives its colour, and its entry in the legend. `value`: None where it was not measured."""

    label: str
    series: str
    value: float | None


def bars(title: str, drawn: Sequence[Bar]) -> str:
    """Return an SVG document with a row for each bar, from the top."""
    series = list(dict.fromkeys(bar.series for bar in drawn))
    # Text stays text, and equal figures give equal bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sds", "font.size": 9.0}):
        figure = Figure(figsize=(WIDTH_IN, HEAD_IN + ROW_IN * len(drawn)), layout="constrained")
        axes = figure.subplots()
        for name in series:
            places = [place for place, bar in enumerate(drawn) if bar.series == name]
            values = [drawn[place].value for place in places]
            patches = axes.barh(places, [value or 0.0 for value in values], label=name)
            axes.bar_label(patches, ["not measured" if value is None else f"{value}" for value in values], padding=4)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_yticks(range(len(drawn)), [bar.label for bar in drawn])
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        if len(series) > 1:
            axes.legend(frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=NO_DATE)
    return written.getvalue()


def stages(found: Report) -> str:
    drawn = [Bar(stage, sort, ms) for sort, of in found["stages_ms"].items() for stage, ms in of.items()]
    return bars("Stages of one decision, median ms", drawn)


def peers(found: Report) -> str:
    every = [found["ours"], *found["ours_besides"], *found["peers"]]
    drawn = [
        Bar(of["name"], kind, of[key])
        for of in every
        for kind, key in (("fixed", "ms_p50"), ("digits", "digits_ms_p50"))
    ]
    return bars("One decision, median ms: shorter is better", drawn)


def throughput(found: Report) -> str:
    sides = (("ours", "ours"), ("best peer", "peer"))
    drawn = [Bar(f"{of['at_once']} at once", who, of[key]["per_s"]) for of in found["rows"] for who, key in sides]
    return bars("Decisions a second: longer is better", drawn)


def ledger(found: Report) -> str:
    drawn = [Bar(f"{row['entries']} entries", "p50", row["durable_us"]["p50"]) for row in found["ledger"]]
    return bars("Durable verdict by ledger size, median us", drawn)


def gpu(found: Report) -> str:
    drawn = [
        Bar(f"{at_once} at once", of["model"]["name"], rate)
        for of in found["models"]
        for at_once, rate in of["ours_per_s"].items()
    ]
    return bars("Decisions a second on the card", drawn)


# By question: the plot's file beside the page, and the function that draws it.
PLOTS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "hotpath": ("report-stages.svg", stages),
    "peers": ("report-peers.svg", peers),
    "throughput": ("report-throughput.svg", throughput),
    "scaling": ("report-ledger.svg", ledger),
    "gpu": ("report-gpu.svg", gpu),
}

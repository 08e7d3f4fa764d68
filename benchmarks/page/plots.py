"""Bars as SVG, written by hand: a title, a row for every bar, its label before it and its value behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 860, 300, 90
ROW, BAR, TOP = 22, 15, 44
COLOURS = ("#2f6db3", "#e08a2e", "#5a9c57", "#9a5fb0", "#b34a4a", "#777777")


@dataclass(frozen=True, slots=True)
class Bar:
    """`series`: whose it is; its colour is that of its place among all series, and the same everywhere."""

    label: str
    series: str
    value: float | None


def bars(title: str, drawn: Sequence[Bar]) -> str:
    """Return an SVG document; bars begin at zero, and one without a value says so."""
    series = list(dict.fromkeys(bar.series for bar in drawn))
    most = max((bar.value or 0.0 for bar in drawn), default=0.0) or 1.0
    height = TOP + ROW * len(drawn) + 12
    rows = [_row(bar, TOP + ROW * number, most, series.index(bar.series)) for number, bar in enumerate(drawn)]
    legend = [_legend(name, number) for number, name in enumerate(series)] if len(series) > 1 else []
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f'<text x="10" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
            *legend,
            *rows,
            "</svg>\n",
        ]
    )


def _row(bar: Bar, y: int, most: float, series: int) -> str:
    length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) * (bar.value or 0.0) / most
    said = "not measured" if bar.value is None else f"{bar.value}"
    middle = y + BAR - 3
    return (
        f'<text x="{LABEL_WIDTH - 6}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>'
        f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[series % len(COLOURS)]}"/>'
        f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{middle}">{said}</text>'
    )


def _legend(name: str, number: int) -> str:
    x = LABEL_WIDTH + 110 * number
    return (
        f'<rect x="{x}" y="26" width="11" height="11" fill="{COLOURS[number % len(COLOURS)]}"/>'
        f'<text x="{x + 16}" y="36">{escape(name)}</text>'
    )

"""The results of `sds eval` as one HTML page that needs no network: tables, and diagrams as SVG in the page."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sds.kernel.errors import UsageError
from sds.models.protocol import extra_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_DATE = dict.fromkeys(("Date", "Creator", "Format", "Type"))
SIZE_IN = (4.6, 3.4)


def check_place(path: Path) -> None:
    """Check the path of a page before anything is measured. Raises UsageError: no extra `bench`, or no such folder."""
    for name in ("jinja2", "matplotlib"):
        if find_spec(name) is None:
            raise UsageError(f"--html needs `{name}`", hint=extra_hint("bench"))
    there = path if path.exists() else path.parent if path.parent.is_dir() and not path.is_symlink() else None
    if path.is_dir() or there is None or not os.access(there, os.W_OK):
        raise UsageError(f"`{path}` cannot be written", hint="name a file in a folder that this user can write to")


def page(document: Mapping[str, Any]) -> str:
    """Return the page. Needs the extra `bench`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  an extra

    environment = Environment(
        loader=PackageLoader("sds.judgement.evaluation"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template("page.html.j2").render(document=document, pictures=_pictures(document)) + "\n"


def number(value: object) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _pictures(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, SVG) of every diagram."""
    found = list[tuple[str, str]]()
    for name, readers in document["readings"].items():
        if bins := readers["fitted"].get("reliability"):
            found.append((f"reading.{name}: how often it is right, by how certain it is", _reliability(bins)))
    fitted = document["decisions"].get("fitted", {})
    if fitted.get("risk_coverage"):
        found.append(
            ("Decisions: share that is wrong, by share that is decided", _risk_coverage(fitted["risk_coverage"]))
        )
        found.append(("Decisions: how often they are right, by confidence", _reliability(fitted["reliability"])))
    return found


def _reliability(bins: Sequence[Sequence[float]]) -> str:
    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], linestyle=":", color="0.6")
        axes.plot([each[0] for each in bins], [each[1] for each in bins], marker="o")
        axes.set_xlabel("confidence, 15 bins of equal mass")
        axes.set_ylabel("share right")
        axes.set_xlim(0, 1.02)
        axes.set_ylim(0, 1.02)

    return _drawn(draw)


def _risk_coverage(curve: Sequence[Sequence[float]]) -> str:
    def draw(axes: Axes) -> None:
        axes.plot([each[0] for each in curve], [each[1] for each in curve])
        axes.set_xlabel("coverage")
        axes.set_ylabel("error among decided")
        axes.set_xlim(0, 1.02)
        axes.set_ylim(bottom=0)

    return _drawn(draw)


def _drawn(draw: Callable[[Axes], None]) -> str:
    from matplotlib import rc_context  # noqa: PLC0415  an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sds", "font.size": 9.0}):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=NO_DATE)
    return written.getvalue()[written.getvalue().index("<svg") :]

"""Render the page as Markdown: `templates/` has one template for each question, and `page.md.j2` around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from sds.benchmarks.kernel import ROWS
from sds.benchmarks.lib.measuring import Report

BLANK_LINES = re.compile(r"\n{3,}")


def section(name: str, found: Report) -> str:
    """Return a question's section. Where the document lacks something, raises LookupError, TypeError or the like."""
    try:
        return _rendered(name, **found, document=found, asks=_asks(name), kernel_rows=ROWS)
    except UndefinedError as error:
        raise LookupError(str(error)) from error


def whole(**parts: object) -> str:
    """Return the page around its sections."""
    return _rendered("page", **parts) + "\n"


def _rendered(name: str, **values: object) -> str:
    return BLANK_LINES.sub("\n\n", _ENVIRONMENT.get_template(f"{name}.md.j2").render(values)).strip()


def _asks(name: str) -> str:
    """Return the question's docstring after its first paragraph: what it measures, and what it predicted."""
    paragraphs = str(import_module(f"sds.benchmarks.{name}").__doc__).strip().split("\n\n")[1:]
    return "\n\n".join(f"```\n{text}\n```" if text.startswith("    ") else text for text in paragraphs)


def _cell(value: object) -> object:
    """Return a value as a cell of a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value)) or "-"
    return value


def _line(text: object) -> str:
    """Return foreign text on one line with its bars escaped, so that it stays in its cell."""
    return " ".join(str(text or "-").split()).replace("|", "\\|")


def _weights(model: object) -> object:
    if not isinstance(model, Mapping):
        return model
    runs = f", in {model['library']}" if "library" in model else ""
    runs += f" in {model['dtype']}" if "dtype" in model else ""
    return f"{model.get('name')}, SHA-256 {str(model.get('sha256'))[:12]}{runs}"


def _machine_of(found: Report) -> tuple[object, ...]:
    return tuple(map(found.get, ("machine", "features", "cores")))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_ENVIRONMENT = Environment(
    loader=PackageLoader("sds.benchmarks.page"),
    undefined=StrictUndefined,
    finalize=_cell,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # noqa: S701  Markdown, of documents that were measured here
)
_ENVIRONMENT.filters |= {"line": _line, "weights": _weights, "machine_of": _machine_of, "code": _code}

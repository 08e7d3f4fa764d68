"""How commands show values: one line each, units beside their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from sds.kernel.canonical import is_seen
from sds.kernel.envelope.envelope import format_literal


def plain(value: object) -> str:
    """Return a value on one line, what cannot be seen spelled out: a claim's text must not draw on this page."""
    return "".join(char if is_seen(char) else ascii(char)[1:-1] for char in str(value))


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 claim`, `2 claims`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number_range(name: str, allowed: Any) -> str:
    """Return what a number may be: its bounds, and its step where that is more than one unit."""
    low, high = format_literal(allowed.lo, allowed.scale), format_literal(allowed.hi, allowed.scale)
    step = f" in steps of {format_literal(allowed.step, allowed.scale)}" if allowed.step > 1 else ""
    return f"{name} {low} to {high}{step}" if allowed.lo < allowed.hi else f"{name} {low}"


def print_either(as_json: bool, data: Mapping[str, Any] | list[Any], lines: Iterable[str], *, none: str = "") -> None:
    """Print JSON for programs, or lines for people; `none` is said beside where there is no line."""
    if as_json:
        print_json(data)
        return
    shown = False
    for line in lines:
        shown = True
        typer.echo(line)
    if none and not shown:
        typer.echo(none, err=True)


def print_json(data: Mapping[str, Any] | list[Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, default=str))

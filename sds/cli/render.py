"""Format values for commands' output: one line each, with units beside numbers.

Every command prints with what is here: no text of a claim, a record or a file can control the terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import rich.console
import typer
from rich.text import Text

from sds.kernel.canonical import seen_json, seen_text
from sds.kernel.envelope.envelope import format_literal

# Of an address that was typed: all that may be a user and a password, however it is written
_USERINFO = re.compile(r"(:/{1,2})(?!/?USER@HOST).*@")
_LINE_END = re.compile("(\r?\n)")
_A_PASSWORD = re.compile(r"(?i)((?:password|passwd|pwd)\s*=).*")


def without_password(text: str) -> str:
    """Return an error's text without what may be a password in the words that it repeats."""
    return _A_PASSWORD.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def plain(value: object) -> str:
    """Return a value on one line, with invisible characters escaped, so that a claim's text cannot control the terminal."""
    return seen_text(str(value))


def shown(text: str) -> str:
    """Return a text of several lines as `plain` does, but with its ends of lines."""
    return "".join(part if number % 2 else plain(part) for number, part in enumerate(_LINE_END.split(text)))


def echo(text: object = "", *, nl: bool = True, err: bool = False) -> None:
    typer.echo(shown(str(text)), nl=nl, err=err)


class Console(rich.console.Console):
    """Rich's console, in whose texts invisible characters are escaped."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(shown(text), **how)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 claim`, `2 claims`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number_range(name: str, allowed: Any) -> str:
    """Return a number's bounds, and its step where that is more than one minor unit."""
    low, high = format_literal(allowed.lo, allowed.scale), format_literal(allowed.hi, allowed.scale)
    step = f" in steps of {format_literal(allowed.step, allowed.scale)}" if allowed.step > 1 else ""
    return f"{name} {low} to {high}{step}" if allowed.lo < allowed.hi else f"{name} {low}"


def shares(probabilities: Mapping[str, float]) -> str:
    """Return the probabilities of what a model could choose, likeliest first."""
    likeliest = sorted(probabilities.items(), key=lambda share: -share[1])
    return ", ".join(f"{label} {p:.3f}" for label, p in likeliest)


def print_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """Print facts below their title, one a line; nothing where there are none."""
    if facts:
        console.print(title)
    for name, value in facts.items():
        console.print(f"  {name}: {'-' if value is None or value == '' else plain(value)}")


def print_either(as_json: bool, data: Mapping[str, Any] | list[Any], lines: Iterable[str], *, none: str = "") -> None:
    """Print JSON, or lines for people. `none` goes to standard error where there is no line."""
    if as_json:
        print_json(data)
        return
    printed = False
    for line in lines:
        printed = True
        echo(plain(line))
    if none and not printed:
        echo(none, err=True)


def print_json(data: Mapping[str, Any] | list[Any]) -> None:
    typer.echo(seen_json(json.dumps(data, ensure_ascii=False, default=str)))

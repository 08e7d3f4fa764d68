"""The commands in a hint, for the gate that was typed. The hints of kernel and host name no gate, its name or a placeholder."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from sds.cli.common import as_name
from sds.definitions.definition import DEFAULT, NAME
from sds.definitions.registry import FILE, installed, is_path
from sds.host.paths import decisions_path, gate_home
from sds.kernel.errors import SdsError

_BEGINS = re.compile(r"\bsds (?=[a-z])")
_NAMED = re.compile(r"--gate (?:GATE|PATH)\b")
_PLACEHOLDERS = ("GATE", "PATH")


def at_gate(hint: str, app: typer.Typer, args: list[str]) -> str:
    """Return a hint whose commands name the gate that was typed, as it was typed, so that they work where they are pasted.

    `args`: what was typed after `sds`. Where no gate was typed the commands take the same default as the command did.
    """
    root: Any = typer.main.get_command(app)
    typed = _typed_gate(root, args)
    before, *commands = _BEGINS.split(hint)
    if not typed or not commands:
        return hint
    named = [_command_at(root, each, typed, alone=not before and len(commands) == 1) for each in commands]
    return "sds ".join([before, *named])


def with_gate_option(app: typer.Typer, args: list[str]) -> str:
    """Return a command that was typed with a gate among its arguments, with the option `--gate` in that place; "" where it has
    no such option, or would be a mistake all the same.
    """
    leaf, words = _leaf(typer.main.get_command(app), args)
    options, gates = [each for each in leaf.params if _is_gate(each)], [each for each in words if _is_known(each)]
    if len(gates) != 1 or len(options) != 1:  # two where the command takes GATE, too
        return ""
    at = words.index(gates[0])
    mended = [*words[:at], "--gate", *words[at:]]
    with suppress(Exception):
        if not leaf.make_parser(leaf.context_class(leaf)).parse_args(list(mended))[1]:
            return shlex.join(["sds", *args[: len(args) - len(words)], *mended])
    return ""


def _is_known(word: str) -> bool:
    """Tell whether a word is the name of an installed gate or of a record in the home, or the path of a gate."""
    if is_path(word):
        return word.endswith(".py") or (Path(word) / FILE).is_file()
    return word in installed() or (NAME.fullmatch(word) is not None and decisions_path(gate_home(word)).is_file())


def _typed_gate(root: Any, args: list[str]) -> str:
    """Return the one gate that was typed, or the default of the option `--gate`; "" without either."""
    leaf, words = _leaf(root, args)
    gates = [each for each in leaf.params if _is_gate(each)]
    with suppress(Exception):  # what was typed may be no command at all: then the error says so
        given = leaf.make_parser(leaf.context_class(leaf)).parse_args(list(words))[0]
        typed = [value for each in gates if isinstance(value := given.get(each.name), str)]
        return typed[0] if typed else DEFAULT if any(each.default == DEFAULT for each in gates) else ""
    return ""


def _leaf(root: Any, args: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words begin with, and the words after it."""
    words = list(args)
    while words and words[0] in getattr(root, "commands", ()):
        root = root.commands[words.pop(0)]
    return root, words


def _is_gate(parameter: Any) -> bool:
    return "--gate" in parameter.opts or parameter.metavar == "GATE"


def _command_at(root: Any, text: str, typed: str, *, alone: bool) -> str:
    """Return the text behind `sds `, a command and perhaps prose, with the gate. `alone`: it may be all of the hint."""
    names = re.match(r"[a-z-]+(?: [a-z-]+)?", text)
    leaf, prose = _leaf(root, names[0].split() if names else [])
    head = text[: len(names[0]) - len(" ".join(["", *prose]))] if names else ""
    gates, rest, gate = [each for each in leaf.params if _is_gate(each)], text[len(head) :], shlex.quote(typed)
    if _NAMED.search(rest):
        return head + _NAMED.sub(lambda _: f"--gate {gate}", rest)
    if not gates or "--gate" in rest or "--help" in rest:
        return text
    if any(each.metavar == "GATE" for each in gates):
        first = re.match(r" ([^\s-]\S*)", rest)
        if first is None or first[1] in (*_PLACEHOLDERS, _name_of(typed)):
            return f"{head} {gate}{rest[first.end() :] if first else rest}"
        return text
    mentioned = any(each.required and each.opts[0].startswith("-") and each.opts[0] not in rest for each in leaf.params)
    if mentioned or typed == DEFAULT or any(each.multiple for each in gates):
        return text
    return f"{text} --gate {gate}" if alone and _is_whole(leaf, rest) else f"{head} --gate {gate}{rest}"


def _name_of(typed: str) -> str:
    try:
        return as_name(typed)
    except SdsError:
        return ""


def _is_whole(leaf: Any, rest: str) -> bool:
    """Tell whether a text is the arguments of a command, and nothing else."""
    with suppress(Exception):
        given, more, _ = leaf.make_parser(leaf.context_class(leaf)).parse_args(shlex.split(rest))
        return not more and all(value is None or isinstance(value, str | bool) for value in given.values())
    return False

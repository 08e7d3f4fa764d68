"""YAML with line numbers: plain data, and the line of every path.

Refused: duplicate keys, aliases (a small file can expand to gigabytes), nulls, decimal fractions outside the sections that
measure shares, numbers not in decimal form, keys that are not text, files over the limit, nesting over DEPTH_MAX, and
characters that control a terminal or turn a text, also where an escape brings them in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

import yaml

from sds.kernel.canonical import control_in
from sds.kernel.errors import ContractError

FILE_BYTES_MAX = 64 * 1024
DEPTH_MAX = 16

Path = tuple[str | int, ...]


class Lines(dict[Path, int]):
    """The line of every path. `misread`: a mend for each place where YAML read text as a truth value or a number."""

    def __init__(self) -> None:
        super().__init__()
        self.misread: dict[Path, str] = {}


_LINE_END = re.compile("\r\n?|\n")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,15})\.[0-9]{1,18}")
_MEND = "mend this line or the one before: indent with spaces, close brackets and quotes, quote texts with `: ` or ` #`"
_FRACTIONS_IN = ("aggregate_thresholds", "max_error")  # only in these sections may a number have decimals


@lru_cache(maxsize=8)  # a command reads its gate's contract several times, and most of that is parsing
def load_with_lines(text: str, name: str, *, controls: bool = False) -> tuple[Any, Lines]:
    """Return (data, lines by path), which no caller alters. Raises ContractError with `name` and the line.

    `controls`: texts may hold control characters, as those of a contract may that was registered when they could.
    """
    if len(text) > FILE_BYTES_MAX:
        raise ContractError(f"{name}:1: larger than {FILE_BYTES_MAX} characters")
    composer = None
    try:
        composer = _Composer(text, name)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        indented = ": indent the line like its neighbours" if "<block end>" in str(error.problem) else ""
        raise ContractError(f"{name}:{line}: not YAML: {error.problem}{indented}", hint=_MEND) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ContractError(f"{name}:{line}: not YAML: character {error.character:#06x} is not allowed") from error
    except (ValueError, OverflowError) as error:  # of an escape such as "\UFFFFFFFF"
        line = composer.line + 1 if composer else 1
        raise ContractError(f"{name}:{line}: not YAML: a number in it is too large") from error
    if root is None:
        raise ContractError(f"{name}:1: the file is empty")
    lines = Lines()
    data = _build(root, (), lines, name)
    if not controls:
        _refuse_controls(text, root, name)
    return data, lines


def _refuse_controls(text: str, root: yaml.Node, name: str) -> None:
    """Raise ContractError for the first line with a control character: in the file itself, comments too, or in a value."""
    found = [(number, control_in(line)) for number, line in enumerate(_LINE_END.split(text), 1)]
    found += [(node.start_mark.line + 1, control_in(str(node.value))) for node in _scalars(root)]
    if bad := [each for each in found if each[1]]:
        line, code = min(bad)
        raise ContractError(
            f"{name}:{line}: the character {code} is not allowed: it controls a terminal or turns the text"
        )


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    for each in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in each if isinstance(each, tuple) else (each,):
            yield from _scalars(part)


class _Composer(yaml.SafeLoader):
    """Reads one document, and refuses what would be expensive to build before it is built."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._name, self._depth = name, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        where, nested = f"{self._name}:{event.start_mark.line + 1}", isinstance(event, yaml.CollectionStartEvent)
        self._depth += nested
        if isinstance(event, yaml.AliasEvent):
            raise ContractError(f"{where}: YAML aliases are not allowed")
        if self._depth > DEPTH_MAX:
            raise ContractError(f"{where}: nested deeper than {DEPTH_MAX}")
        node = super().compose_node(parent, index)
        self._depth -= nested
        return node


def _build(node: yaml.Node, path: Path, lines: Lines, name: str) -> Any:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, name)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, index), lines, name) for index, item in enumerate(node.value)]
    where = f"{name}:{lines[path]}: {'.'.join(map(str, path))}".removesuffix(": ")
    text = str(node.value)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ContractError(f"{where}: holds half a character: \\ud800 to \\udfff are no characters")
    if path and path[0] in _FRACTIONS_IN and node.tag == "tag:yaml.org,2002:float" and _DECIMAL.fullmatch(text):
        return Decimal(text)
    value = _scalar(str(node.tag), text, where)
    if not isinstance(value, str):
        kind = "a truth value" if isinstance(value, bool) else "a number"
        lines.misread[path] = f'YAML reads `{text[:40]}` as {kind}: write "{text[:40]}"'
    return value


def _mapping(node: yaml.MappingNode, path: Path, lines: Lines, name: str) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ContractError(f"{name}:{line}: a key must be text")
        key = str(key_node.value)
        if not key.isprintable():
            raise ContractError(f"{name}:{line}: a key has a character that cannot be printed")
        if key in built:
            raise ContractError(f"{name}:{line}: `{key}` is given twice")
        built[key] = _build(value_node, (*path, key), lines, name)
        lines[(*path, key)] = line
    return built


def _scalar(tag: str, text: str, where: str) -> bool | int | str:
    """Return a plain value by its YAML tag. Raises ContractError for a form that contracts do not use."""
    kind = tag.removeprefix("tag:yaml.org,2002:")
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "int" and _INTEGER.fullmatch(text):
        return int(text)
    if kind in ("int", "float", "null"):
        if not text:
            raise ContractError(f"{where}: has no value: write one, or leave the field out")
        whole = "numbers are whole, amounts in minor units; " if kind == "float" else ""
        mend = f': {whole}text is written "{text}"' if len(text) <= 40 else ""
        raise ContractError(f"{where}: `{text[:40]}` is neither text nor a plain whole number{mend}")
    if kind not in ("str", "timestamp", "value", "merge"):
        raise ContractError(f"{where}: `{kind[:40]}` is a YAML tag: put the text in quotes")
    return text

"""YAML with line numbers: plain data, and for every path the line it stands on.

Refused: duplicate keys, aliases (a small file can expand to gigabytes), floats and nulls, files over the limit.
"""

from __future__ import annotations

from typing import Any

import yaml

from sds.kernel.errors import ContractError

FILE_BYTES_MAX = 64 * 1024

Path = tuple[str | int, ...]
Lines = dict[Path, int]


def load_with_lines(text: str, name: str) -> tuple[Any, Lines]:
    """Return (data, lines by path). Raises ContractError with `name` and the line."""
    if len(text.encode()) > FILE_BYTES_MAX:
        raise ContractError(f"{name}: larger than {FILE_BYTES_MAX} bytes")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ContractError(f"{name}: aliases are not allowed")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ContractError(f"{name}:{line}: {error.problem or 'not YAML'}") from error
    except yaml.YAMLError as error:
        raise ContractError(f"{name}: not YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        raise ContractError(f"{name}: the file is empty")
    lines: Lines = {}
    return _build(root, (), lines, name), lines


def _build(node: yaml.Node, path: Path, lines: Lines, name: str) -> Any:
    line = node.start_mark.line + 1
    lines[path] = line
    if isinstance(node, yaml.MappingNode):
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in built:
                raise ContractError(f"{name}:{key_node.start_mark.line + 1}: `{key}` is given twice")
            built[key] = _build(value_node, (*path, key), lines, name)
            lines[(*path, key)] = key_node.start_mark.line + 1
        return built
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, index), lines, name) for index, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:int":
        return int(node.value.replace("_", ""), 0)
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("true", "yes", "on")
    if node.tag in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:null"):
        raise ContractError(f"{name}:{line}: `{node.value or 'null'}` is neither text nor an integer")
    return str(node.value)

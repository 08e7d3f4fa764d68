"""Checks an ONNX file before it is run: only standard operators, and nothing outside the file.

Only the relevant parts of the format are read (onnx.proto, field numbers in the comments); all else is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from sds.models.readers.protocol import ReaderError

DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
DEPTH_MAX = 8  # graphs within graphs
_HINT = "fit it again"
_GRAPH, _FUNCTIONS, _TRAINING = 7, 25, 20  # of a model
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15  # of a graph
_ATTRIBUTE, _DOMAIN = 5, 7  # of a node
_TENSORS, _GRAPHS = (5, 10), (6, 11)  # of an attribute
_EXTERNAL = (13, 14)  # of a tensor: where its numbers lie, if not here


def check_onnx(model: bytes) -> None:
    """Raise ReaderError where the file is damaged, uses a non-standard operator, or names another file."""
    try:
        graphs = 0
        for field, value in _fields(memoryview(model)):
            if field in (_FUNCTIONS, _TRAINING):
                raise ReaderError("a model defines operators of its own", hint=_HINT)
            if field == _GRAPH:
                graphs += 1
                _check_graph(value, DEPTH_MAX)
    except (ValueError, LookupError, TypeError, UnicodeDecodeError) as error:
        raise ReaderError("a model is not an ONNX file", hint=_HINT) from error
    if graphs != 1:
        raise ReaderError("a model is not an ONNX file", hint=_HINT)


def _check_graph(graph: memoryview, depth: int) -> None:
    if not depth:
        raise ReaderError(f"a model has graphs nested more than {DEPTH_MAX} deep", hint=_HINT)
    for field, value in _fields(graph):
        if field == _INITIALIZER:
            _check_tensor(value)
        elif field == _SPARSE:
            raise ReaderError("a model holds sparse tensors", hint=_HINT)
        elif field == _NODE:
            _check_node(value, depth)


def _check_node(node: memoryview, depth: int) -> None:
    for field, value in _fields(node):
        if field == _DOMAIN and (domain := bytes(value).decode()) not in DOMAINS:
            raise ReaderError(f"a model uses operators of `{domain[:40]}`, which are not standard", hint=_HINT)
        if field == _ATTRIBUTE:
            for part, inner in _fields(value):
                if part in _TENSORS:
                    _check_tensor(inner)
                elif part in _GRAPHS:
                    _check_graph(inner, depth - 1)


def _check_tensor(tensor: memoryview) -> None:
    if any(field in _EXTERNAL for field, _ in _fields(tensor)):
        raise ReaderError("a model refers to weights in another file", hint=_HINT)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield each field's number and, where it has a length, its bytes. Raises ValueError where the message is cut short."""
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            start = place
            _, place = _varint(message, place)
        elif kind == 2:
            length, start = _varint(message, place)
            place = start + length
        elif kind in (1, 5):
            start, place = place, place + (8 if kind == 1 else 4)
        else:
            raise ValueError(kind)
        if place > end:
            raise ValueError(place)
        yield key >> 3, message[start:place]


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(place)

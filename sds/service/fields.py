"""Read what a request names, and refuse anything else: the parameters of a query, and a body that is a small JSON object."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import Request

from sds.kernel.canonical import no_number, one_line
from sds.kernel.errors import EventError
from sds.kernel.flow.intake import in_utf8, once
from sds.kernel.human.parsing import Number
from sds.service.body import read_body
from sds.service.problems import Problem, unknown_parameter

TEXT, FLAG, OBJECT = "string", "boolean", "object"  # JSON Schema's words
_TYPES: Mapping[str, type] = {TEXT: str, FLAG: bool, OBJECT: dict}


NESTED_MAX = 32  # levels of objects and lists


def body_schema(
    required: Mapping[str, str], optional: Mapping[str, str], said: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the OpenAPI description of a body with these fields, by name and JSON Schema type. `said`: more of some of them."""
    kinds = {**required, **optional}
    properties = {name: {"type": kind, **(said or {}).get(name, {})} for name, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": sorted(required), "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def check_query(request: Request) -> None:
    """Refuse what a route does not take in its query, by what /openapi.json says of it: a misspelt filter would list
    everything. Raises Problem: USAGE.
    """
    described = request.query_params and request.app.openapi()["paths"].get(request.scope["route"].path)
    if not described:
        return
    route = described[request.method.lower()]
    known = {each["name"]: each["schema"] for each in route.get("parameters", ()) if each["in"] == "query"}
    given = Counter(name for name, _ in request.query_params.multi_items())
    for name, times in given.items():
        if name not in known:
            raise unknown_parameter(name, known)
        if times > 1 and known[name].get("type") != "array":
            raise Problem("USAGE", f"the parameter `{name}` is given twice")


async def read_fields(request: Request, required: Mapping[str, str], optional: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a body; one that was not sent has no key. Raises Problem: USAGE, and as `read_body` does."""
    fields = _parsed(await read_body(request))
    kinds = {**required, **optional}
    if unknown := [name for name in fields if name not in kinds]:
        raise Problem("USAGE", f"there is no field `{one_line(unknown[0], 40)}`", hint=f"fields: {', '.join(kinds)}")
    if missing := [name for name in required if name not in fields]:
        raise Problem("USAGE", f"the field `{missing[0]}` is missing")
    for name, value in fields.items():
        if type(value) is not _TYPES[kinds[name]]:
            raise Problem("USAGE", f"the field `{name}` must be of the JSON type {kinds[name]}")
    return fields


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        text = in_utf8(raw)
        data = json.loads(text, object_pairs_hook=once, parse_float=Number, parse_int=Number, parse_constant=no_number)
        text.encode()
        json.dumps(data, ensure_ascii=False).encode()  # raises for a lone surrogate, written as \ud800
    except EventError as error:
        raise Problem("USAGE", str(error).replace("the event", "the body", 1)) from None
    except (ValueError, RecursionError):
        raise Problem("USAGE", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise Problem("USAGE", "the body must be a JSON object")
    if _is_nested_too_deep(data):
        raise Problem("USAGE", "the body is nested too deeply", hint=f"nest at most {NESTED_MAX} objects and lists")
    return data


def _is_nested_too_deep(data: object) -> bool:
    level = [data]
    for _ in range(NESTED_MAX):
        level = [each for outer in level for each in _within(outer) if isinstance(each, dict | list)]
    return bool(level)


def _within(outer: object) -> Iterable[object]:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, list) else ()


def as_written(value: object) -> str:
    """Return a value of `read_fields` as JSON text, its numbers as they were written."""
    if isinstance(value, Number):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{as_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_written, value)) + "]"
    return json.dumps(value)

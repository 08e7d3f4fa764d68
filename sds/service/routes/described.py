"""The document at /openapi.json: the schemas of answers and problems, and for each gate a path with its own event."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from pydantic import TypeAdapter, create_model
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sds.kernel.canonical import ID_CHARS_MAX
from sds.kernel.flow.states import Answer
from sds.service.deciding.terms import DEADLINE_HEADER, DEADLINE_QUERY, KEY_CHARS_MAX
from sds.service.gates import OpenGate
from sds.service.problems import MEDIA_TYPE, Problem, response_of
from sds.service.reasons import REASONS

DECIDE = "/v1/gates/{gate}/decisions"
Schema = dict[str, Any]
_PARAMETER = re.compile(r"\{[^}]*\}")

ANSWER: Schema = {"$ref": "#/components/schemas/Answer"}
_OBJECT: Schema = {"type": "object"}
_WHOLE: Schema = {"type": "number", "multipleOf": 1}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _problem(description: str) -> Schema:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}


PROBLEMS: dict[int | str, Schema] = {
    "4XX": _problem("The request is refused. `reason_code` says why; /errors explains every code."),
    "5XX": _problem("The request failed. `retryable` and `Retry-After` say whether and when to send it again."),
}
_LOCATION: Schema = {"Location": {"description": "The address of the decision.", "schema": {"type": "string"}}}
DECIDED: dict[int | str, Schema] = {
    200: {
        "description": "The decision, whatever it is.",
        "content": _json(ANSWER),
        "headers": {
            "Idempotent-Replayed": {
                "description": "`true`: the first answer under the same key, sent again.",
                "schema": {"type": "string", "enum": ["true"]},
            }
        },
    },
    202: {
        "description": "The event is on record and is being decided.",
        "content": _json(ANSWER),
        "headers": _LOCATION,
    },
}
SHOWN: dict[int | str, Schema] = {
    200: {
        "description": "The decision as it stands now, its audit facts and, for reviewers, the whole record.",
        "content": _json(
            {
                "type": "object",
                "required": ["decision", "audit"],
                "properties": {"decision": ANSWER, "audit": _OBJECT, "record": _OBJECT},
            }
        ),
    }
}
LISTED: dict[int | str, Schema] = {
    200: {
        "description": "Decisions, the newest first. `next` is the cursor of the next page, or null. A page of one state may be "
        "short or empty and still have a `next`.",
        "content": _json(
            {
                "type": "object",
                "required": ["decisions", "next"],
                "properties": {
                    "decisions": {
                        "type": "array",
                        "items": {"allOf": [ANSWER, {"type": "object", "properties": {"opened_at_ms": _WHOLE}}]},
                    },
                    "next": {"type": ["string", "null"]},
                },
            }
        ),
    }
}


def _parameter(place: str, name: str, schema: Schema, description: str) -> Schema:
    return {"in": place, "name": name, "required": False, "schema": schema, "description": description}


_MS: Schema = {**_WHOLE, "minimum": 1}
_DEADLINE = "The deadline, in milliseconds from now. After it nothing is decided or sent. Header or query, not both."
_KEY: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": KEY_CHARS_MAX,
    "pattern": r"^[!#-~]([ -~]*[!-~])?$",
}
ASKING: Schema = {
    "parameters": [
        _parameter("header", DEADLINE_HEADER, _MS, _DEADLINE),
        _parameter("query", DEADLINE_QUERY, _MS, _DEADLINE),
        _parameter("header", "Prefer", {"type": "string"}, "`respond-async`: answer 202 once the event is on record."),
        _parameter("header", "Idempotency-Key", _KEY, "The same key and event get the first answer, byte for byte."),
    ],
    "requestBody": {"required": True, "content": _json(_OBJECT)},
}


def describe(app: FastAPI, gates: Mapping[str, OpenGate]) -> None:
    """Have an application describe each gate's path, with its own event, in place of the path with `{gate}`."""
    generated = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            document = generated()  # the application keeps this object and returns it from then on
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(_components())
            anyone = document["paths"].pop(DECIDE)
            for name, gate in gates.items():
                document["paths"][DECIDE.replace("{gate}", name)] = _of_gate(anyone, gate)
        return app.openapi_schema or {}

    def not_allowed(request: Request, error: Exception) -> Response:
        given = error.headers or {} if isinstance(error, HTTPException) else {}
        allowed = _methods(openapi(), request.url.path) or given.get("Allow", "")
        return response_of(Problem("METHOD_NOT_ALLOWED", headers={"Allow": allowed}))

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
    app.add_exception_handler(405, not_allowed)  # Starlette names the methods of a path's first route alone


def _methods(document: Schema, path: str) -> str:
    """Return the methods of a path as the value of `Allow`; "" where the path is not described."""
    allowed = set[str]()
    for template, methods in document["paths"].items():
        if re.fullmatch(_PARAMETER.sub("[^/]+", template), path):
            allowed.update(method.upper() for method in methods)
    return ", ".join(sorted(allowed))


def _of_gate(anyone: Schema, gate: OpenGate) -> Schema:
    own = deepcopy(anyone)
    post = own["post"]
    post["operationId"] = f"decide_{gate.name}"
    post["summary"] = f"Decide an event of {gate.name}"
    post["parameters"] = [each for each in post["parameters"] if each["in"] != "path"]
    for each in post["parameters"]:
        if each["name"] in (DEADLINE_HEADER, DEADLINE_QUERY):
            each["schema"] = {**_MS, "maximum": gate.deadline_ms_max}
    post["requestBody"]["content"] = _json(event_schema(gate))
    return own


def event_schema(gate: OpenGate) -> Schema:
    """Return the JSON Schema of a gate's event. `identifier`: printable, in NFC, no digits but 0 to 9, no outer blanks."""
    event = gate.gate.contract.event
    identifier = {"type": "string", "minLength": 1, "maxLength": ID_CHARS_MAX, "format": "identifier"}
    properties: Schema = {event.id: identifier, event.key: identifier}
    if event.evidence:
        properties[event.evidence] = {"type": "string", "description": "The whole event may have at most 65,536 bytes."}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _components() -> Schema:
    hints = get_type_hints(Answer)
    kinds: dict[str, Any] = {field.name: (hints[field.name], ...) for field in fields(Answer)}
    model = create_model("Answer", pending=(bool, ...), retryable=(bool, ...), **kinds)
    return {"Answer": TypeAdapter(model).json_schema(), "Problem": _PROBLEM}


_PROBLEM: Schema = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "reason_code", "retryable", "hint"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": _WHOLE,
        "detail": {"type": "string"},
        "reason_code": {"type": "string", "enum": list(REASONS)},
        "retryable": {"type": "boolean"},
        "hint": {"type": "string"},
        "dfid": {"type": "string"},
        "instance": {"type": "string"},
    },
}

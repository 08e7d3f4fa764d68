"""Check every answer of a service against what its /openapi.json says of it: status, headers, and each key of the body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jsonschema
from fastapi import FastAPI

from sds.service.gates import OpenGate
from sds.service.problems import MEDIA_TYPE
from sds.service.routes.described import event_schema

HEADERS = ("Location", "Retry-After", "Idempotent-Replayed", "Preference-Applied", "WWW-Authenticate")
FORMATS = jsonschema.FormatChecker(())


@FORMATS.checks("date-time", raises=ValueError)
def _is_time(value: object) -> bool:
    return datetime.fromisoformat(str(value)).tzinfo is not None


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no key that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(each) for key, each in schema.items()}
    return {"additionalProperties": False, **inner} if "properties" in schema and "type" in schema else inner


_MADE: dict[str, Any] = {}


class Description:
    """The description of an application, made when it is first needed: once for all with gates of the same events and limits."""

    def __init__(self, app: FastAPI, gates: Mapping[str, OpenGate]) -> None:
        self._app, self._gates = app, gates

    @cached_property
    def document(self) -> Any:
        gates = repr([(name, each.deadline_ms_max, event_schema(each)) for name, each in self._gates.items()])
        if gates not in _MADE:
            _MADE[gates] = closed(self._app.openapi())
        return _MADE[gates]

    def check(self, response: Any) -> None:
        """Hold a response against its description. A path that is not described may only answer problems as all do."""
        media = response.headers.get("content-type", "").partition(";")[0]
        if media == "text/event-stream" or response.request.method == "HEAD":
            return
        response.read()
        described = self._of(response)
        if described is None:
            schema = {"$ref": "#/components/schemas/Problem"} if media == MEDIA_TYPE else None
        else:
            schema = described["content"][media]["schema"]
            sent = {name for name in HEADERS if name in response.headers}
            assert sent <= set(described.get("headers", ())), (str(response.request.url), response.status_code, sent)
        if schema is not None and media.endswith("json"):
            self.validate(schema, response.json())

    def validate(self, schema: Any, value: object) -> None:
        whole = {**schema, "components": self.document["components"]}
        jsonschema.validate(value, whole, cls=jsonschema.Draft202012Validator, format_checker=FORMATS)

    def _of(self, response: Any) -> Any:
        """Return what is said of a response; None where its path or method is not described."""
        operation = next(self._operations(response.request), None)
        if operation is None:
            return None
        assert str(response.status_code) in operation["responses"], (str(response.request.url), response.text)
        described = operation["responses"][str(response.status_code)]
        name = described.get("$ref", "").rpartition("/")[2]
        return self.document["components"]["responses"][name] if name else described

    def _operations(self, request: Any) -> Iterator[Any]:
        for path, methods in self.document["paths"].items():
            if (
                re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", path), request.url.path)
                and request.method.lower() in methods
            ):
                yield methods[request.method.lower()]

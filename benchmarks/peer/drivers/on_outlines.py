"""Outlines over any library that it drives."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sds.benchmarks.peer.drivers.serving import Decide, Request, Said, timed

BACKENDS = {"outlines_core": "OutlinesCoreBackend", "llguidance": "LLGuidanceBackend"}


def by_outlines(driven: Any, backend: str, options: Any) -> Decide:
    """Return a function that decides with a model that Outlines drives. `options(request)`: its generator's options.

    The backend's compiler, which Outlines' own `backend=` would make for each request, is made once.
    """
    outlines: Any = import_module("outlines")
    compiler = getattr(outlines.backends, BACKENDS[backend])(driven)

    def decide(request: Request) -> Said:
        processor, compile_ms = timed(lambda: compiler.get_regex_logits_processor(request["regex"]))
        return Said(outlines.Generator(driven, processor=processor)("-", **options(request)), compile_ms)

    return decide

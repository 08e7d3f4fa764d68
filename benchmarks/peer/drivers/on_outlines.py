"""Outlines over whatever library it drives: its logits processor is made of an expression once, and kept."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sds.benchmarks.peer.drivers.serving import Decide, Request, Said, timed

BACKENDS = {"outlines_core": "OutlinesCoreBackend", "llguidance": "LLGuidanceBackend"}


def by_outlines(driven: Any, backend: str, options: Any) -> Decide:
    """Return what decides with a model that Outlines drives. `options(request)`: what its generator is given.

    `backend` makes a logits processor of an expression, as Outlines' own `backend=` would choose it, but kept.
    """
    outlines: Any = import_module("outlines")
    compiler = getattr(outlines.backends, BACKENDS[backend])(driven)

    def decide(request: Request) -> Said:
        processor, compile_ms = timed(lambda: compiler.get_regex_logits_processor(request["regex"]))
        return Said(outlines.Generator(driven, processor=processor)("-", **options(request)), compile_ms)

    return decide

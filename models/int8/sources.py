"""The C++ sources of the int8 engine, and whether they were compiled here. No library is loaded for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

PASSES = Path(__file__).parent / "native"


def passes_sources() -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the sources."""
    digest = hashlib.sha256()
    for source in sorted([*PASSES.glob("*.cc"), *PASSES.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def compiled_passes() -> str | None:
    """Return of which sources they were compiled, None: they were not."""
    return passes_sources() if any(PASSES.glob("*.so")) else None

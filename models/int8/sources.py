"""The C++ sources of the int8 engine (`native/`), the sources it was compiled from, and its data types."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sds.models.protocol import Dtype

DTYPES: tuple[Dtype, ...] = ("int8", "int16")  # the first, which is the faster one, is the default
PASSES = Path(__file__).parent / "native"  # the sources and the compiled libraries


def passes_sources() -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the sources."""
    digest = hashlib.sha256()
    for source in sorted([*PASSES.glob("*.cc"), *PASSES.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def compiled_passes() -> str | None:
    """Return the digits of the sources that the engine was compiled from; None where it was not compiled."""
    return passes_sources() if any(PASSES.glob("*.so")) else None

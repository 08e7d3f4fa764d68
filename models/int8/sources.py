"""The C++ sources of the int8 engine (`native/`), of which of them it was compiled, and in what it computes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sds.models.protocol import Dtype

DTYPES: tuple[Dtype, ...] = ("int8", "int16")  # the first where nobody says it: it is the quicker one
PASSES = Path(__file__).parent / "native"  # the sources, and what was compiled of them


def passes_sources() -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the sources."""
    digest = hashlib.sha256()
    for source in sorted([*PASSES.glob("*.cc"), *PASSES.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def compiled_passes() -> str | None:
    """Return of which sources the engine was compiled, None: it was not."""
    return passes_sources() if any(PASSES.glob("*.so")) else None

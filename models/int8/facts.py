"""Facts about the int8 engine, which is our own, that are known before it is loaded."""

from __future__ import annotations

from sds.models.facts import BackendFacts, Opening
from sds.models.int8.sources import DTYPES, compiled_passes, passes_sources
from sds.models.protocol import Backend, Dtype


def _open(opening: Opening) -> Backend:
    from sds.models.int8.backend import IntegerBackend  # noqa: PLC0415  what was compiled is loaded when it is asked for

    return IntegerBackend(opening.path, **opening.of("dtype", "threads", "slots", "fingerprint"))


def _facts(_device: str, dtype: Dtype | None) -> dict[str, object]:
    return {"dtype": dtype or DTYPES[0], "passes": passes_sources()}


def _outruns() -> bool:
    """Return whether it is faster: three times, where bytes are multiplied in one instruction; elsewhere it is measured."""
    from sds.models.int8.library import KINDS, kind_here  # noqa: PLC0415  numpy is loaded with a model

    return kind_here() == next(iter(KINDS))


INT8 = BackendFacts(
    name="integer",
    title="integer",
    distribution="sovereign-decision-stream",
    dtypes=DTYPES,
    usual_dtype=lambda: DTYPES[0],
    bits_need_slots=True,
    open=_open,
    version=compiled_passes,
    facts=_facts,
    measured_in=DTYPES,
    outruns=_outruns,
    machine_key="integer",
    runs_as="integer passes",
)

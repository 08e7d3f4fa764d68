"""Opens the weights a model is run with: what was prepared of them for this machine, or they themselves.

Whatever is wrong with what was prepared is a notice, never a failure: the source is opened instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sds.models.protocol import Backend, BackendError


@dataclass(frozen=True, slots=True)
class Opened:
    """`notices`: why what was prepared is not run, a line each.

    `noise_logp_max`: what company does to log-probabilities with these weights, `noise_slots` at once; None: not known.
    """

    backend: Backend
    notices: tuple[str, ...] = ()
    noise_logp_max: float | None = None
    noise_slots: int = 0


def open_weights(source: Path, opener: Callable[[Path], Backend], *, cache: Path) -> Opened:
    """Open a GGUF, or what was prepared of it in `cache`. Raises BackendError where `source` itself does not open."""
    from sds.models.catalog import not_used, weights_for  # noqa: PLC0415
    from sds.models.llama import LlamaBackend  # noqa: PLC0415  the library is loaded when a model is

    found, notice = weights_for(source, cache)
    if found is not None:
        try:
            backend = opener(found.path)
        except BackendError as error:
            notice = not_used(error)
        else:
            if isinstance(backend, LlamaBackend):
                backend.name = found.name
            return Opened(backend, (), found.record.shape_noise_logp_max, found.record.shape_noise_slots or 0)
    return Opened(opener(source), (notice,) if notice else ())

"""The Sovereign Decision Stream: a local model decides, and cannot step outside its authority.

    from sds import Gate

    with Gate.load("refund") as gate:
        answer = gate.decide({"claim_id": "...", "ticket_id": "...", "claim_text": "..."})

Importing `sds` loads nothing else: the model's libraries come with the first `Gate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sds.gate import Gate

__all__ = ["Gate"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Gate":
        from sds.gate import Gate  # noqa: PLC0415  lazily: importing `sds` must stay free

        return Gate
    raise AttributeError(f"module `sds` has no attribute `{name}`")

"""What every backend refuses before anything is read, in the same words. Each raises BackendError."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sds.models.protocol import SLOTS_MAX, BackendError, Row

_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,2}))?")


def check_slots(slots: int) -> None:
    if not 1 <= slots <= SLOTS_MAX:
        raise BackendError(f"{slots} slots are not between 1 and {SLOTS_MAX}")


def check_device(name: str) -> int | None:
    """Return the number of the card that is named, None where none is. Only the form is checked: cpu, cuda, cuda:1."""
    found = _DEVICE.fullmatch(name)
    if found is None:
        raise BackendError(f"`{name}` is no device", hint="cpu, cuda or cuda:NUMBER")
    return int(found[1]) if found[1] else None


def check_fits(tokens: int, context_tokens_max: int) -> None:
    if tokens > context_tokens_max:
        raise BackendError(
            f"{tokens} tokens are more than the model's context of {context_tokens_max}",
            hint="shorten the prompt or load the model with a larger context",
        )


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise BackendError("a token is outside the vocabulary")


def check_rows(rows: Sequence[Row]) -> None:
    if len({row.slot for row in rows}) != len(rows):
        raise BackendError("a pass holds at most one row of a slot")
    for row in rows:
        if not row.tokens:
            raise BackendError("a step needs at least one token")
        if not 0 <= row.outputs <= len(row.tokens):
            raise BackendError(f"{row.outputs} outputs of {len(row.tokens)} tokens were asked for")

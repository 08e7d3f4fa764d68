"""For how long an executor's outside remembers a key: what it calls `absent` after that is no knowledge.

A payment gateway that forgets keys after a day says `absent` of what it paid two days ago, makes the key void, and pays it
again. So of an order that may be forgotten neither is believed and nothing is sent: only a human can tell its end.
"""

from __future__ import annotations

from typing import Literal

from sds.kernel.errors import UsageError
from sds.kernel.storage.ledger import BACK_MS
from sds.kernel.storage.store import Reader

CLOCK_MARGIN_MS = (
    5 * 60_000
)  # how much sooner than it says an outside may have forgotten: its clock, ours, the way there
FORGOTTEN = "absent, and the outside may have forgotten its key by now: a human must find out"

_BEGAN = "SELECT idx, at_ms FROM ledger WHERE dfid = ? AND kind = ? ORDER BY idx LIMIT 1"
_SET_BACK = "SELECT 1 FROM clock_steps WHERE idx > ? LIMIT 1"
_LAST = "SELECT at_ms FROM ledger ORDER BY idx DESC LIMIT 1"


def keys_kept_ms(executor: object) -> int | None:
    """Return for how long an executor says that its outside remembers a key; None: for ever. Raises UsageError."""
    kept = getattr(executor, "keys_kept_ms", None)
    if kept is not None and (type(kept) is not int or kept <= 0):
        hint = "milliseconds from its first order on, or None: for ever"
        raise UsageError(f"`keys_kept_ms` of the executor is no time: `{str(kept)[:40]}`", hint=hint)
    return kept


def is_kept(
    record: Reader,
    dfid: str,
    since: Literal["RESERVED", "REVERSAL"],
    *,
    kept_ms: int | None,
    now_ms: int,
    margin_ms: int,
) -> bool:
    """Tell whether the outside certainly still knows the key of what the record says began with this entry of a flow.

    Counted from the entry's time, less `margin_ms`. A clock that was set back since shows no age that can be trusted.
    """
    if kept_ms is None:
        return True
    began = record.row(_BEGAN, (dfid, since))
    if began is None:
        return False
    idx, at_ms = began
    if now_ms - at_ms > kept_ms - margin_ms or record.value(_SET_BACK, (idx,)) is not None:
        return False
    return bool(record.value(_LAST) <= now_ms + BACK_MS)

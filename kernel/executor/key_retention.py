"""How long an executor's outside remembers a key. After that its `absent` says nothing.

A payment gateway that forgets keys after a day says `absent` of what it paid two days ago; it would void the key, or pay it
again. So when a key may be forgotten, `absent` is not believed, and nothing is sent or voided: a human must find out.
"""

from __future__ import annotations

from typing import Literal

from sds.kernel.errors import UsageError
from sds.kernel.storage.ledger import BACK_MS
from sds.kernel.storage.store import Reader

CLOCK_MARGIN_MS = 5 * 60_000  # an outside may forget this much sooner than it says: two clocks, and the way there
FORGOTTEN = "absent, but the outside may have forgotten the key by now: a human must find out"
ACCEPTED_BEFORE = "absent, but the outside had accepted the order before: a human must find out"

_BEGAN = "SELECT idx, at_ms FROM ledger WHERE dfid = ? AND kind = ? ORDER BY idx LIMIT 1"
_SET_BACK = "SELECT 1 FROM clock_steps WHERE idx > ? LIMIT 1"
_LAST = "SELECT at_ms FROM ledger ORDER BY idx DESC LIMIT 1"


def keys_kept_ms(executor: object) -> int | None:
    """Return for how many milliseconds an executor's outside remembers a key; None: for ever. Raises UsageError."""
    kept = getattr(executor, "keys_kept_ms", None)
    if kept is not None and (type(kept) is not int or kept <= 0):
        hint = "a whole number of milliseconds above 0, or None: for ever"
        raise UsageError(f"`keys_kept_ms` of the executor is not a time: `{str(kept)[:40]}`", hint=hint)
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
    """Tell whether the outside certainly still knows the key of a flow's order, or of its reversal.

    Its age counts from the flow's first ledger entry of the kind `since`; `margin_ms` is subtracted from the time that keys
    are kept. After the clock was set back no age can be trusted.
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

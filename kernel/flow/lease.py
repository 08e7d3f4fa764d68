"""A lease: the time in which the holder of a flow may still be at work on it, so that others leave the flow alone.

That an order has its effect at most once does not rest on leases, and so on no clock. A holder whose lease was taken for
over finds its flow closed in the transaction that would reserve. What is reserved has one key: recovery looks it up, and
sends it again only under that key, to an executor that honours it; else it voids the key or leaves the order UNKNOWN.
"""

from __future__ import annotations


def runs(begun_ms: int, until_ms: int, now_ms: int) -> bool:
    """Tell whether a lease from `begun_ms` until `until_ms` (milliseconds since 1970) still runs.

    It is over after its end, and also if it begins further ahead than it is long: then the clock was ahead when it was
    written and has been set back, and waiting for that time would hold what is reserved for as long. Up to its own length
    it is waited for: of two who share a record, one may have read the clock a little earlier.
    """
    return begun_ms - (until_ms - begun_ms) <= now_ms <= until_ms

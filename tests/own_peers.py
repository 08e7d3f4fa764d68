"""Peers that misbehave, for tests of `sds bench peers`: the driver `tests.own_peers`, with the option HOW."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said


def beyond_its_bounds(request: Request) -> Said:
    """Refund more than is permitted, in the right form."""
    (reference,) = re.findall(r"[0-9a-f]{64}", request["regex"])
    params = '"params":{"amount":100000.00},"reason":"NOT_TRAVELLED"'
    return Said(f'{{"action":"REFUND_TICKET",{params},"context_ref":"{reference}"}}', 0.5)


def for_another_case(request: Request) -> Said:
    """Escalate, which is always permitted, but with the reference of another snapshot."""
    reference = "0" * 64
    return Said(f'{{"action":"ESCALATE","reason":"HUMAN_REVIEW","context_ref":"{reference}"}}')


def raising(request: Request) -> Said:
    raise ValueError("no token is left")


def dying(request: Request) -> Said:
    sys.exit("out of luck")


def sleeping(request: Request) -> Said:
    time.sleep(600)
    return Said("")


def open_peer(model: Path, threads: int, options: list[str]) -> Peer:
    (how,) = options
    if how == "missing":
        raise ImportError("no module named anything")
    ways = {"beyond": beyond_its_bounds, "elsewhere": for_another_case}
    ways |= {"raising": raising, "dying": dying, "sleeping": sleeping}
    return Peer(ways[how], ("numpy",), "misbehaves")

"""Orders to pay, as the kernel would send them."""

from __future__ import annotations

import hashlib

from sds.gates.refund.rail_client import RailExecutor
from sds.kernel.executor import ExecutionIntent, Receipt

SOON_S = 5.0


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def intent_for(name: str, amount: int = 25_000, kind: str = "COMPENSATE") -> ExecutionIntent:
    return ExecutionIntent(f"dfid-{name}", key_of(name), kind, (("amount", amount),), f"TKT-{name}", "1")


def pay(executor: RailExecutor, name: str, amount: int = 25_000, deadline_s: float = SOON_S) -> Receipt:
    return executor.dispatch(intent_for(name, amount), key_of(name), deadline_s)

"""Post-execution governance (DIR 4.6): what single verdicts cannot see, seen over the last decisions.

Run it beside the hot path. A breach suspends the agent; only an operator reactivates it.
"""

from __future__ import annotations

import json
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.flow.states import WAITING_TAGS
from sds.kernel.registry import counter_scale, registry
from sds.kernel.storage.store import Store

# An operator who reactivates an agent has looked at what it did: the window starts anew there.
_REACTIVATED = (
    "SELECT 1 FROM ledger WHERE idx > ? AND kind = 'AGENT' AND json_extract(body, '$.agent_id') = ?"
    " AND json_extract(body, '$.status') = 'ACTIVE' AND COALESCE(json_extract(body, '$.was'), 'SUSPENDED') = 'SUSPENDED'"
)

# What only waited is no decision: an overload must not push the payments out of the window.
_DECIDED = f"COALESCE(json_extract(body, '$.tag'), '') NOT IN ({', '.join(map(repr, sorted(WAITING_TAGS)))})"


def breach(store: Store, contract: Contract) -> str | None:
    """Return one line about the first aggregate threshold the agent's last decisions exceed, else None."""
    limits = contract.aggregate_thresholds
    # from the end backwards, as far as the window reaches: the ledger grows, and others wait for the store meanwhile
    rows = store.rows(
        "SELECT idx, body FROM ledger WHERE kind = 'DECIDED' AND json_extract(body, '$.agent_id') = ?"
        f" AND {_DECIDED} ORDER BY idx DESC LIMIT ?",
        (contract.agent_id, limits.window),
    )
    if len(rows) < limits.window or store.row(_REACTIVATED, (rows[-1][0], contract.agent_id)):
        return None
    paid = _paid(store, contract, [json.loads(text) for _, text in rows])
    if len(paid) * 100 > limits.paid_pct_max * limits.window:
        return f"{len(paid)} of the last {limits.window} decisions paid, over {limits.paid_pct_max} %"
    ours = {kind.scale(kind.spends) for kind in contract.kinds.values() if kind.spends}
    amounts = [amount for amount, scale in paid if scale in ours]
    mean_max = limits.paid_mean_minor_max
    if mean_max is not None and amounts and sum(amounts) > mean_max * len(amounts):
        return f"the last {len(amounts)} payments average {sum(amounts) // len(amounts)}, over {mean_max}"
    return None


def _paid(store: Store, contract: Contract, decided: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return (amount, its decimals) of the decisions that paid, each by the contract it was made under."""
    rows = store.rows("SELECT hash, body -> '$.kinds' FROM contracts WHERE agent_id = ?", (contract.agent_id,))
    known = {name: json.loads(text) for name, text in rows if text}
    found: list[tuple[int, int]] = []
    for body in decided:
        kind = known.get(body["contract_hash"], {}).get(body["action"])
        scale = counter_scale.spends_at(kind) if kind else None
        if body["state"] == "EXECUTING" and scale is not None:
            found.append((int(body["params"].get(kind["spends"], 0)), scale))
    return found


def watch(store: Store, contract: Contract, *, now_ms: int) -> str | None:
    """Suspend the agent when a threshold is exceeded; return why, or None. Several watchers suspend it once."""
    if breach(store, contract) is None:
        return None
    with store.transaction():
        why, known = breach(store, contract), registry.lookup(store, contract.agent_id)
        if why is None or known is None or known.status != "ACTIVE":
            return None
        registry.move(store, contract.agent_id, "SUSPENDED", by="runtime", reason=why, now_ms=now_ms)
    return why

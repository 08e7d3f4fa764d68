"""Post-execution governance (DIR 4.6): what single verdicts cannot see, seen over the last decisions.

Run it beside the hot path. A breach suspends the agent; only an operator reactivates it.
"""

from __future__ import annotations

import json

from sds.kernel import registry
from sds.kernel.contract import Contract
from sds.kernel.store import Store

# An operator who reactivates an agent has looked at what it did: the window starts anew there.
_REACTIVATED = (
    "SELECT 1 FROM ledger WHERE idx > ? AND kind = 'AGENT' AND json_extract(body, '$.agent_id') = ?"
    " AND json_extract(body, '$.status') = 'ACTIVE' AND COALESCE(json_extract(body, '$.was'), 'SUSPENDED') = 'SUSPENDED'"
)


def breach(store: Store, contract: Contract) -> str | None:
    """Return one line about the first aggregate threshold the agent's last decisions exceed, else None."""
    limits = contract.aggregate_thresholds
    # from the end backwards, as far as the window reaches: the ledger grows, and others wait for the store meanwhile
    rows = store.rows(
        "SELECT idx, body FROM ledger WHERE kind = 'DECIDED' AND json_extract(body, '$.agent_id') = ?"
        " ORDER BY idx DESC LIMIT ?",
        (contract.agent_id, limits.window),
    )
    if len(rows) < limits.window or store.row(_REACTIVATED, (rows[-1][0], contract.agent_id)):
        return None
    paid: list[int] = []
    for _, text in rows:
        body = json.loads(text)
        spec = contract.kinds.get(body["action"] or "")
        if body["state"] == "EXECUTING" and spec is not None and spec.spends:
            paid.append(int(body["params"].get(spec.spends, 0)))
    if len(paid) * 100 > limits.paid_pct_max * limits.window:
        return f"{len(paid)} of the last {limits.window} decisions paid, over {limits.paid_pct_max} %"
    mean_max = limits.paid_mean_minor_max
    if mean_max is not None and paid and sum(paid) > mean_max * len(paid):
        return f"the last {len(paid)} payments average {sum(paid) // len(paid)}, over {mean_max}"
    return None


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

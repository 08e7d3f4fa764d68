"""What the ledger says of revoked contracts and of escalation budgets, against their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sds.kernel.store import Reader

_REVOKED = "SELECT contract_hash, who, reason, revoked_at_ms FROM contract_revocations"
_BUDGETS = "SELECT agent_id, parts, at_ms FROM escalation_budgets"


class Standing:
    """Folds the entries; raises what a malformed one raises."""

    def __init__(self) -> None:
        self._revoked: dict[str, tuple[str, str, int]] = {}  # contract -> who, why, when
        self._budgets: dict[str, tuple[int, int]] = {}  # agent -> parts, when

    def fold(self, at_ms: int, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "REVOKED":
            self._revoked[body["hash"]] = body["who"], body["reason"], at_ms
        elif kind == "DECIDED" and "escalations" in body:
            parts, spent_at_ms = body["escalations"]
            self._budgets[body["agent_id"]] = parts, spent_at_ms
        elif kind == "AGENT" and (body.get("was"), body["status"]) == ("SUSPENDED", "ACTIVE"):
            self._budgets.pop(body["agent_id"], None)

    def faults(self, store: Reader) -> list[str]:
        return [
            *_differences("revocation of contract", store, _REVOKED, self._revoked),
            *_differences("escalation budget of", store, _BUDGETS, self._budgets),
        ]


def _differences(what: str, store: Reader, sql: str, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    now = {row[0]: row[1:] for row in store.rows(sql)}
    return [
        f"{what} {name}: the table says {now.get(name)}, the ledger {wanted.get(name)}"
        for name in sorted({*now, *wanted})
        if now.get(name) != wanted.get(name)
    ]

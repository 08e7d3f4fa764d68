"""In which units the record's counters count. A counter is a number without decimals of its own: 200 drawn as euros would
be two euros to a contract that counts cents. So no contract takes over a counter that was counted in other units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sds.kernel.contract.compiler import parse_type
from sds.kernel.contract.expressions import INT
from sds.kernel.contract.schema import Contract
from sds.kernel.registry import carried_spend, spend
from sds.kernel.registry.compatibility import Refusal
from sds.kernel.storage.store import Reader

_OTHERS = (
    "SELECT c.gate, c.body FROM agents a JOIN contracts c ON c.hash = a.contract_hash"
    " WHERE a.agent_id <> ? AND a.status <> 'RETIRED'"
    " AND c.hash NOT IN (SELECT contract_hash FROM contract_revocations) ORDER BY c.gate"
)


def refusal(store: Reader, contract: Contract, now_ms: int) -> Refusal | None:
    """Return why a contract cannot be put in force: it would count in other units what is drawn or spent now, or what it
    and the contract of another gate share once either has drawn from it. None: it can.
    """
    counted: dict[str, int | None] = {}
    for (body,) in store.rows("SELECT body FROM contracts ORDER BY registered_at_ms, hash"):
        counted |= _units(json.loads(body), fed=True)
    for counter in _differing(counted, contract):
        path = counter.rpartition("#")[2]
        if path in contract.snapshot and _drawn(store, counter):
            return Refusal(
                f"`{path}` is declared as `{contract.snapshot[path]}`, but draws from it were counted with"
                f" {counted[counter]} decimals",
                "keep the field's type, or declare the other type under a new name, from which nothing is drawn yet",
            )
        if path not in contract.snapshot and _spent(store, contract, now_ms):
            decimals = "different numbers of" if counted[counter] is None else counted[counter]
            return Refusal(
                f"what is spent in this hour or day was counted with {decimals} decimals, but this"
                " contract spends with another number",
                "suspend the agent until the hour or day is over, then register the contract",
            )
    return _at_odds(store, contract)


def _at_odds(store: Reader, contract: Contract) -> Refusal | None:
    """Return why this contract and another gate's cannot both count what they share and one of them draws."""
    ours = contract.written
    for gate, body in store.rows(_OTHERS, (contract.agent_id,)):
        theirs = json.loads(body)
        here, there = _units(ours), _units(theirs)
        drawn = _units(ours, fed=True).keys() | _units(theirs, fed=True).keys()
        for counter in sorted(drawn & here.keys() & there.keys()):
            path = counter.rpartition("#")[2]
            if here[counter] != there[counter]:
                return Refusal(
                    f"`{path}` is declared as `{contract.snapshot[path]}`, but gate `{gate}`, which shares it, declares it"
                    f" as `{theirs['snapshot'][path]}`",
                    "declare it as that gate does, or under another name",
                )
    return None


def recounted(before: Mapping[str, Any], contract: Contract) -> bool:
    """Tell whether a registered contract (`before`, as JSON) feeds a counter that `contract` counts in other units."""
    return bool(_differing(_units(before, fed=True), contract))


def _differing(counted: Mapping[str, int | None], contract: Contract) -> list[str]:
    ours = _units(contract.written)
    return [counter for counter, decimals in counted.items() if ours.get(counter, decimals) != decimals]


def _units(contract: Mapping[str, Any], *, fed: bool = False) -> dict[str, int | None]:
    """Return the decimals of every counter that a contract looks at; with `fed`, only of those that it can add to.

    Counters are named by a pattern: `source:*#path` for what is drawn, the gate for what is spent. None: the field is no
    number, or what is spent has several scales, which an older version of this program accepted.
    """
    kinds = [*contract["kinds"].values(), *contract.get("human", {}).get("kinds", {}).values()]
    drawn = {path for kind in kinds for path in kind["draws"]}
    found: dict[str, int | None] = {}
    for path, declared in contract["snapshot"].items():
        if path in drawn or not fed:
            spec = parse_type(path, declared)
            found[f"{contract['source']}:*#{path}"] = spec.scale if spec.kind == INT else None
    spent = {scale for kind in kinds if (scale := spends_at(kind)) is not None}
    if spent:
        found[contract["gate"]] = spent.pop() if len(spent) == 1 else None
    return found


def spends_at(kind: Mapping[str, Any]) -> int | None:
    """Return the decimals in which a registered contract's kind, as JSON, spends. None: it spends nothing."""
    return (kind["params"] | kind["fills"])[kind["spends"]]["scale"] if kind["spends"] else None


def _spent(store: Reader, contract: Contract, now_ms: int) -> bool:
    """Tell whether anything counts against a contract's limits now, or would be carried over to them."""
    return spend.anything_counted(store, contract, now_ms) or carried_spend.anything_spent(store, contract, now_ms)


def _drawn(store: Reader, counter: str) -> bool:
    """Tell whether anything is drawn from a resource that the pattern `counter` names."""
    begin, _, end = counter.partition("*")
    sql = (
        "SELECT 1 FROM resources WHERE drawn > 0 AND substr(resource, 1, ?) = ?"
        " AND substr(resource, length(resource) - ?) = ? LIMIT 1"
    )
    return store.row(sql, (len(begin), begin, len(end) - 1, end)) is not None

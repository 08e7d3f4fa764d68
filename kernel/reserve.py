"""What one decision takes from the world, taken before anything is sent: resources and spend limits.

At most one live reservation for a resource, held until it is settled or certainly rejected, and subtracted from
live state meanwhile. Everything here runs inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sds.kernel.contract import Contract, SpendLimit
from sds.kernel.errors import StoreError
from sds.kernel.state import Fields
from sds.kernel.store import Store


@dataclass(frozen=True, slots=True)
class Needs:
    """What a decision takes: (snapshot field, amount) drawn, and the amount counted against spend limits."""

    draws: tuple[tuple[str, int], ...]
    spends: int


def needs_of(contract: Contract, kind: str, numbers: Mapping[str, int]) -> Needs:
    spec = contract.kinds[kind]
    draws = tuple((path, n if isinstance(n, int) else numbers[n]) for path, n in sorted(spec.draws.items()))
    return Needs(draws, numbers[spec.spends] if spec.spends else 0)


def resource(contract: Contract, key: str, path: str) -> str:
    """Name the resource behind a field: `source:key#path`."""
    return f"{contract.source}:{key}#{path}"


def drawn_fields(contract: Contract) -> tuple[str, ...]:
    return tuple(sorted({path for kind in contract.kinds.values() for path in kind.draws}))


def read_draws(store: Store, contract: Contract, key: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return, for every drawable field, its resource's epoch and what is already drawn from it."""
    epochs: dict[str, int] = {}
    drawn: dict[str, int] = {}
    for path in drawn_fields(contract):
        row = store.row("SELECT epoch, drawn FROM resources WHERE resource = ?", (resource(contract, key, path),))
        epochs[path], drawn[path] = row or (0, 0)
    return epochs, drawn


def held_fields(store: Store, contract: Contract, key: str) -> frozenset[str]:
    """Return the fields whose resource is under a live reservation."""
    sql = "SELECT 1 FROM reservations WHERE resource = ? AND status = 'live'"
    return frozenset(p for p in drawn_fields(contract) if store.row(sql, (resource(contract, key, p),)))


def scope(contract: Contract, limit: SpendLimit, fields: Fields, now_ms: int) -> str:
    """Name the counter a limit uses now: gate, limit, UTC hour or day, and the value it is counted for."""
    form = "%Y-%m-%dT%H" if limit.window == "hour" else "%Y-%m-%d"
    window = datetime.fromtimestamp(now_ms / 1000, UTC).strftime(form)
    return f"{contract.gate}/{limit.name}/{window}/{fields.get(limit.per, '?') if limit.per else '*'}"


def spend_left(store: Store, contract: Contract, fields: Fields, now_ms: int) -> int | None:
    """Return what is left under the tightest limit, in minor units; None when there is no limit."""
    left = [limit.max_minor - _used(store, scope(contract, limit, fields, now_ms)) for limit in contract.spend]
    return max(0, min(left)) if left else None


def _used(store: Store, name: str) -> int:
    return int(store.value("SELECT used FROM spend_totals WHERE scope = ?", (name,)) or 0)


def take(
    store: Store,
    contract: Contract,
    dfid: str,
    key: str,
    needs: Needs,
    epochs: Mapping[str, int],
    scopes: Iterable[str],
) -> str | None:
    """Reserve everything, or change nothing and return the reason code. `epochs` are those read before live state."""
    now, _ = read_draws(store, contract, key)
    held = held_fields(store, contract, key)
    if any(path in held or now[path] != epochs[path] for path, _ in needs.draws):
        return "RESOURCE_CONTENTION"
    named = list(scopes) if needs.spends else []
    for limit, name in zip(contract.spend, named, strict=False):
        if _used(store, name) + needs.spends > limit.max_minor:
            return "SPEND_LIMIT_EXCEEDED"
    for path, amount in needs.draws:
        name = resource(contract, key, path)
        store.insert("reservations", dfid=dfid, resource=name, amount=amount, status="live")
        store.run(
            "INSERT INTO resources VALUES (?, 1, ?)"
            " ON CONFLICT DO UPDATE SET epoch = epoch + 1, drawn = drawn + excluded.drawn",
            (name, amount),
        )
    for name in named:
        store.insert("spend", dfid=dfid, scope=name, amount=needs.spends)
        store.run(
            "INSERT INTO spend_totals VALUES (?, ?) ON CONFLICT DO UPDATE SET used = used + excluded.used",
            (name, needs.spends),
        )
    return None


def settle(store: Store, dfid: str, *, succeeded: bool, kept: bool) -> None:
    """End a flow's reservations: `kept` keeps what was drawn subtracted, otherwise it is given back."""
    for name, amount in store.rows(
        "SELECT resource, amount FROM reservations WHERE dfid = ? AND status = 'live'", (dfid,)
    ):
        back = 0 if succeeded and kept else amount
        changed = store.run(
            "UPDATE resources SET epoch = epoch + 1, drawn = drawn - ? WHERE resource = ?", (back, name)
        )
        if changed != 1:
            raise StoreError(f"resource `{name}` of a reservation is not in the record", dfid=dfid)
    status = "settled" if succeeded else "released"
    store.run("UPDATE reservations SET status = ? WHERE dfid = ? AND status = 'live'", (status, dfid))
    if not succeeded:
        for name, amount in store.rows("SELECT scope, amount FROM spend WHERE dfid = ?", (dfid,)):
            store.run("UPDATE spend_totals SET used = used - ? WHERE scope = ?", (amount, name))

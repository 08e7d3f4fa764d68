"""What one decision takes from the world, taken before anything is sent: resources and spend limits.

A resource has at most one live reservation. It is held until its order is settled or certainly rejected, and subtracted
from live state meanwhile. Everything here that writes runs inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sds.kernel.contract.schema import Contract
from sds.kernel.errors import StoreError
from sds.kernel.registry import spend
from sds.kernel.storage.store import Row, Store

TYPES_MAX = 1_024  # size of the cache of `_numeric`

# The usage of a resource `u`: columns for statements that read more than that. A count, because PostgreSQL answers an EXISTS
# from one scan of all that is live, and the index still has what was live since the server last cleaned it.
COLUMNS = (
    "u.resource, u.epoch, u.drawn,"
    " (SELECT count(*) FROM reservations l WHERE l.resource = u.resource AND l.status = 'live')"
)
OF_KEY = "u.resource > ? AND u.resource < ?"  # its values: `bounds`
# A human's order is under the contract in force when the human decided, every other order under its flow's.
_SETTLES_IN = (
    "SELECT c.body ->> '$.draws_settle_in' FROM decision_flows f LEFT JOIN human_decisions h ON h.dfid = f.dfid"
    " JOIN contracts c ON c.hash = COALESCE(h.contract_hash, f.contract_hash) WHERE f.dfid = ?"
)
_DRAW = "UPDATE resources SET epoch = epoch + 1, drawn = drawn + ? WHERE resource = ?"
_LEFT_DRAWN = (
    "SELECT CAST(json_extract(body, '$.kept') AS INTEGER) FROM ledger WHERE dfid = ?"
    " AND kind IN ('SETTLED', 'RESOLVED', 'CONTRADICTED', 'ADOPTED') ORDER BY idx DESC LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a decision takes, in minor units: (snapshot field, amount drawn), and the amount spent under spend limits."""

    draws: tuple[tuple[str, int], ...]
    spends: int


@dataclass(frozen=True, slots=True)
class Usage:
    """For every numeric field of one key: its resource's epoch, what is drawn from it, and whether it is held now."""

    epochs: Mapping[str, int]
    drawn: Mapping[str, int]
    held: frozenset[str]


def claim_of(contract: Contract, kind: str, amounts: Mapping[str, int]) -> Claim:
    """Return what a decision of this kind takes. `amounts`: its numbers, in minor units."""
    spec = contract.kinds[kind]
    draws = tuple((path, n if isinstance(n, int) else amounts[n]) for path, n in sorted(spec.draws.items()))
    return Claim(draws, amounts[spec.spends] if spec.spends else 0)


def resource(contract: Contract, key: str, path: str) -> str:
    """Return the name of the resource behind a field: `source:key#path`."""
    return f"{contract.source}:{key}#{path}"


def taken(contract: Contract, dfid: str, key: str, claim: Claim) -> list[Row]:
    """Return what a decision draws as rows of `reservations`, in order: (flow, resource, amount); none for amounts of 0."""
    return sorted((dfid, resource(contract, key, path), amount) for path, amount in claim.draws if amount)


def usage(store: Store, contract: Contract, key: str) -> Usage:
    """Return the usage of every numeric field of a key, by all gates of the same source."""
    rows = store.rows(f"SELECT {COLUMNS} FROM resources u WHERE {OF_KEY}", bounds(contract, key))
    return usage_in(named(contract, key), rows)


def bounds(contract: Contract, key: str) -> tuple[str, str]:
    """Return the names between which all resources of a key lie. Those of a key that goes on behind a `#` lie there, too."""
    return spend.between(resource(contract, key, ""))


def named(contract: Contract, key: str) -> dict[str, str]:
    """Return the resources behind the numeric fields of a key: resource -> field."""
    begin = resource(contract, key, "")
    return {begin + path: path for path, kind in contract.snapshot.items() if _numeric(kind)}


def usage_in(paths: Mapping[str, str], rows: list[Row]) -> Usage:
    """Return the usage in rows of `COLUMNS`. `paths`: resource -> field. Other resources, and None for none, are left out."""
    epochs, drawn = dict.fromkeys(paths.values(), 0), dict.fromkeys(paths.values(), 0)
    for name, epoch, amount, _ in rows:
        if name in paths:
            epochs[paths[name]], drawn[paths[name]] = epoch, amount
    return Usage(epochs, drawn, frozenset(paths[name] for name, _, _, held in rows if held and name in paths))


def holder(store: Store, contract: Contract, key: str) -> str | None:
    """Return the status, PENDING or UNKNOWN, of an order that holds anything of this key. None: nothing is held."""
    paths = named(contract, key)
    found = store.value(
        "SELECT max(e.status) FROM reservations l JOIN execution_log e ON e.dfid = l.dfid WHERE l.status = 'live'"
        f" AND l.resource IN ({', '.join('?' * len(paths))})",
        tuple(paths),
    )
    return None if found is None else str(found)


@lru_cache(TYPES_MAX)
def _numeric(declared: str) -> bool:
    return not declared.startswith(("bool", "string", "enum"))


def reserve(
    store: Store,
    contract: Contract,
    dfid: str,
    key: str,
    claim: Claim,
    now: Usage,
    epochs: Mapping[str, int],
    spending: spend.Scopes,
    known: spend.Totals | None = None,
) -> str | None:
    """Reserve everything that a decision takes, or change nothing and return the reason code.

    `now`: the usage in this transaction. `epochs`: those read just before the live state that was checked: if anything of
    this key was reserved or settled since, even another field, that check does not hold. `spending`: the spend counters of
    this moment; `known`: what the transaction has read of them. Drawing 0 from a resource leaves it alone.
    """
    if now.epochs != epochs or any(path in now.held for path, _ in claim.draws):
        return "RESOURCE_CONTENTION"
    left = spend.left(store, contract, spending, known)
    if claim.spends and left is not None and claim.spends > left:
        return "SPEND_LIMIT_EXCEEDED"
    _draw(store, taken(contract, dfid, key, claim), kept=True, status="live", epochs=1)
    spend.add(store, dfid, spending, claim.spends)
    return None


def of_order(store: Store, dfid: str) -> dict[str, int]:
    """Return what an order in flight holds of each resource."""
    return dict(store.rows("SELECT resource, amount FROM reservations WHERE dfid = ? AND status = 'live'", (dfid,)))


def stays_drawn(store: Store, dfid: str) -> bool:
    """Tell whether what an order drew stays subtracted once it is settled, by the contract under which it was reserved.

    Another contract may be in force now. Whether the source already counts the payout depends on the earlier one.
    """
    return bool(store.value(_SETTLES_IN, (dfid,)) != "source")


def left_drawn(store: Store, dfid: str) -> bool:
    """Tell whether what an order drew was left subtracted when it was settled, by the ledger."""
    return bool(store.value(_LEFT_DRAWN, (dfid,)))


def reserve_again(store: Store, dfid: str, *, succeeded: bool) -> None:
    """Reserve again what was released of an order whose end is contradicted: its effect may have happened.

    `succeeded`: it was settled as such. Then what it spent is still counted, and what it drew may still be subtracted.
    """
    _change_drawn(store, dfid, 0 if succeeded and left_drawn(store, dfid) else 1)
    if not succeeded:
        store.run("UPDATE reservations SET status = 'settled' WHERE dfid = ?", (dfid,))
        spend.recount(store, dfid, 1)


def count(
    store: Store, contract: Contract, dfid: str, key: str, claim: Claim, spending: spend.Scopes | None, *, kept: bool
) -> None:
    """Count what an order took that was carried out without a reservation here. `kept`: what it drew stays subtracted."""
    _draw(store, taken(contract, dfid, key, claim), kept=kept, status="settled", epochs=2)  # one to take, one to settle
    if spending is not None:
        spend.add(store, dfid, spending, claim.spends)


def settle(store: Store, dfid: str, held: list[tuple[str, int, bool]], *, succeeded: bool, kept: bool) -> None:
    """End a flow's reservations. `kept`: what a successful order drew stays subtracted; otherwise it is given back.

    `held`: the resource and the amount of each live reservation, and whether that resource is in the record, as it must be.
    """
    times, status = (0 if succeeded and kept else -1), ("settled" if succeeded else "released")
    for name, amount, is_there in held:
        if not is_there:
            raise _missing(name, dfid)
        store.write(_DRAW, (times * amount, name))
        store.write("UPDATE reservations SET status = ? WHERE dfid = ? AND resource = ?", (status, dfid, name))
    if not succeeded:
        spend.recount(store, dfid, -1)


def release(store: Store, dfid: str, *, kept: bool) -> None:
    """Give back what a settled decision took, because its effect has been undone. `kept`: it was still subtracted."""
    _change_drawn(store, dfid, -1 if kept else 0, status="settled")
    store.run("UPDATE reservations SET status = 'released' WHERE dfid = ? AND status = 'settled'", (dfid,))
    spend.recount(store, dfid, -1)


def _draw(store: Store, rows: list[Row], *, kept: bool, status: str, epochs: int) -> None:
    """Insert reservations and add them to what is drawn of their resources, which then begin `epochs` new epochs."""
    if not rows:
        return
    store.write(
        f"INSERT INTO reservations (dfid, resource, amount, status) VALUES {', '.join(['(?, ?, ?, ?)'] * len(rows))}",
        tuple(value for row in rows for value in (*row, status)),
    )
    store.write(
        f"INSERT INTO resources VALUES {', '.join(['(?, ?, ?)'] * len(rows))}"
        " ON CONFLICT (resource) DO UPDATE SET epoch = resources.epoch + excluded.epoch,"
        " drawn = resources.drawn + excluded.drawn",
        tuple(value for _, name, amount in rows for value in (name, epochs, amount if kept else 0)),
    )


def _change_drawn(store: Store, dfid: str, times: int, *, status: str = "%") -> None:
    """Add what a flow's reservations took, `times` -1, 0 or 1, to what is drawn of each resource, and begin the resource's
    next epoch. Raises StoreError when a resource is missing.
    """
    sql = "SELECT resource, amount FROM reservations WHERE dfid = ? AND status LIKE ?"
    for name, amount in store.rows(sql, (dfid, status)):
        if store.run(_DRAW, (times * amount, name)) != 1:
            raise _missing(name, dfid)


def _missing(name: str, dfid: str) -> StoreError:
    return StoreError(f"resource `{name}` of a reservation is not in the record", dfid=dfid)

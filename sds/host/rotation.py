"""New keys for a record, on the record: what the older ones have signed goes on being verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sds.host import keys, paths
from sds.kernel.errors import CaseKeyError, SdsError, UsageError
from sds.kernel.registry import registry
from sds.kernel.storage import ledger, vault
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.ledger import Head, PublicKeys
from sds.kernel.storage.store import Store

_NEWEST_CASE = (
    "SELECT f.dfid, f.gate, f.event_id, k.wrapped FROM decision_flows f CROSS JOIN case_keys k"
    " ON k.gate = f.gate AND k.event_id = f.event_id ORDER BY f.created_at_ms DESC, f.dfid DESC LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Rotated:
    """The new ledger key, how many keys of each kind there are now, and where older public keys were taken from."""

    ledger_key: str
    orders: int
    ledger: int
    taken_from: Path | None


def rotate(folder: Path, store: Store, *, who: str, reason: str, now_ms: int, lost: bool = False) -> Rotated:
    """Make a new order key and a new ledger key for the record in `folder`, opened as `store`.

    `lost`: the old ones are gone for good. Then orders in flight that they signed can no longer be resolved by
    recovery. Running gates of this folder take the new keys up with their next order. Raises UsageError when keys are
    said to be lost and are not, StoreError when they are and it is not said, and where other keys lie in their place: the
    public halves of the lost ones, which verify the ledger on, are not in that file.
    """
    if lost:
        _refuse_found(folder, store)
    else:
        paths.refuse_lost_key(folder)
        keys.refuse_other_keys(folder, store)
    with store.transaction():
        older, taken_from = _older(folder, store)
        since = older.since if ledger.newest_checkpoint(store) else ledger.head(store)
        ring = keys.renew(folder, since, older=older.keys, now_ms=now_ms)
        made = ring.ledger.public.keys[0] if ring.ledger else ""
        act = "KEYS_LOST" if lost else "KEYS_ROTATED"
        registry.append_act(store, act, who=who, reason=reason, now_ms=now_ms, facts={"ledger_key": made})
    return Rotated(made, len(ring.orders), len(older.keys) + 1, taken_from)


def _refuse_found(folder: Path, store: Store) -> None:
    """Raise UsageError where no keys are lost, or that is on the record already; StoreError where others are in their place."""
    try:
        paths.refuse_lost_key(folder)
    except SdsError:
        return
    keys.refuse_other_ledger_keys(folder, store)
    if not _is_loss_unsaid(folder, store):
        raise UsageError(f"the keys in `{paths.key_path(folder)}` are there", hint='sds keys rotate --reason "..."')


def _is_loss_unsaid(folder: Path, store: Store) -> bool:
    """Tell whether the keys were made after a loss that the record knows nothing of: whoever said so was stopped before it
    was written, or the record was put back from before. Then neither its newest order nor its newest text opens.
    """
    ring, newest = keys.read_ring(paths.key_path(folder)), store.row(_NEWEST_CASE)
    if keys.unknown_key(ring, store):
        return True
    if newest is None or not ring.secrets:
        return False
    dfid, gate, event_id, wrapped = newest
    try:
        Keyring(keys.signer_of(folder)).unwrap(gate, event_id, wrapped)
    except CaseKeyError:
        return not vault.is_lost(store, dfid)
    return False


def _older(folder: Path, store: Store) -> tuple[PublicKeys, Path | None]:
    """Return the public keys that have signed so far, and the file that knew them; else all that the record names."""
    found = paths.known_public_keys(folder)
    if found is not None:
        return found
    signed = ledger.read_checkpoints(store)
    before = signed[0].prev_idx if signed else 0
    stored = store.value("SELECT entry_hash FROM ledger WHERE idx = ?", (before,))
    named = tuple(dict.fromkeys(each.public_key for each in reversed(signed)))
    return PublicKeys(named, Head(before, stored or ledger.GENESIS)), None

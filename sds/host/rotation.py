"""Makes new keys for a record, and records that. Signatures of the older keys still verify."""

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
    """The new ledger key, how many keys of each kind there are now, and the file that had the older public keys."""

    ledger_key: str
    orders: int
    ledger: int
    taken_from: Path | None


def rotate(folder: Path, store: Store, *, who: str, reason: str, now_ms: int, lost: bool = False) -> Rotated:
    """Make a new order key and a new ledger key for the record in `folder`, opened as `store`.

    `lost`: the old keys are gone for good. Recovery can then no longer resolve orders in flight that they signed.
    Running gates of this folder use the new keys from their next order on. Raises UsageError when `lost` is given and
    the keys are there. Raises StoreError when they are gone and `lost` is not given, and where another record's keys
    lie in their place: that file lacks the public halves of the lost ones, which still verify the ledger.
    """
    why = registry.reason_given(reason)  # before a key is made
    if lost:
        _refuse_found(folder, store)
    else:
        paths.refuse_lost_key(folder)
        keys.refuse_other_keys(folder, store)
    with store.transaction():
        older, taken_from = _keys_so_far(folder, store)
        since = older.since if ledger.newest_checkpoint(store) else ledger.head(store)
        ring = keys.renew(folder, since, older=older.keys, now_ms=now_ms)
        made = ring.ledger.public.keys[0] if ring.ledger else ""
        act = "KEYS_LOST" if lost else "KEYS_ROTATED"
        registry.append_act(store, act, who=who, reason=why, now_ms=now_ms, facts={"ledger_key": made})
    return Rotated(made, len(ring.orders), len(older.keys) + 1, taken_from)


def _refuse_found(folder: Path, store: Store) -> None:
    """Raise UsageError where no keys are lost, or the loss is recorded; StoreError where another record's keys are there."""
    try:
        paths.refuse_lost_key(folder)
    except SdsError:
        return
    keys.refuse_other_ledger_keys(folder, store)
    if not _is_unrecorded_loss(folder, store):
        raise UsageError(
            f"the keys in `{paths.key_path(folder)}` are not lost", hint='sds keys rotate --gate GATE --reason "..."'
        )


def _is_unrecorded_loss(folder: Path, store: Store) -> bool:
    """Return whether the keys were made after a loss that the record does not mention. Then they open neither its newest
    order nor its newest text: the recording of the loss was interrupted, or the record was restored from before it.
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


def _keys_so_far(folder: Path, store: Store) -> tuple[PublicKeys, Path | None]:
    """Return the public keys that have signed so far, and the file that has them; without one, those that the record names."""
    found = paths.known_public_keys(folder)
    if found is not None:
        return found
    signed = ledger.read_checkpoints(store)
    before = signed[0].prev_idx if signed else 0
    stored = store.value("SELECT entry_hash FROM ledger WHERE idx = ?", (before,))
    named = tuple(dict.fromkeys(each.public_key for each in reversed(signed)))
    return PublicKeys(named, Head(before, stored or ledger.GENESIS)), None

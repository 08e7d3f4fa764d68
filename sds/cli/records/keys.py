"""`sds keys show` and `rotate`: list a record's signing keys, and make new ones."""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, OpenedGate, Reason, as_name, open_store, operator
from sds.cli.render import counted, echo, print_either
from sds.host import keys as rings
from sds.host.clock import now_ms, when
from sds.host.paths import gate_home, is_there, key_path, refuse_lost_key
from sds.host.rotation import rotate as rotated
from sds.kernel.canonical import sha256_hex


def show(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List a record's signing keys, newest first. The first key of each kind signs. The others verify what they signed.

    Keys for orders are shown by their SHA-256, keys for the ledger by their public half.

    Example: sds keys show
    """
    open_store(gate).close()  # raises where the gate has no record, and so no keys
    folder = gate_home(gate)
    refuse_lost_key(folder)
    path = key_path(folder)
    ring = rings.read_ring(path) if is_there(path) else rings.Ring()
    rows = [("orders", sha256_hex(bytes.fromhex(each.key)), each.made_ms) for each in ring.orders]
    rows += [("ledger", each.key, each.made_ms) for each in (ring.ledger.keys if ring.ledger else ())]
    lines = [f"{kind}  {key}  made {_when(made_ms) or 'before sds recorded the time'}" for kind, key, made_ms in rows]
    if ring.ledger is not None:
        since = ring.ledger.since_entry + 1
        lines.append(f"the ledger is signed since entry {since}; verifiers need `{folder / rings.PUBLIC_FILE}`")
    data = [{"signs": kind, "key": key, "made": _when(made_ms)} for kind, key, made_ms in rows]
    print_either(as_json, data, lines, none="no keys")


def rotate(
    reason: Reason,
    gate: OpenedGate = "refund",
    lost: Annotated[
        bool, typer.Option("--lost", help="The old keys are lost for good. Orders in flight go to a human.")
    ] = False,
) -> None:
    """Make new signing keys. The record notes this. The old keys still verify what they signed. Running gates use the new ones.

    Example: sds keys rotate --reason "once a year"
    """
    name = as_name(gate)
    folder = gate_home(name)
    with closing(open_store(name)) as store:
        made = rotated(folder, store, who=operator(), reason=reason, now_ms=now_ms(), lost=lost)
    signing, verifying = counted(made.orders, "key"), counted(made.ledger, "key")
    echo(f"orders: {signing}; ledger: {verifying}, signing with {made.ledger_key[:16]}")
    echo(
        f"give verifiers the new `{folder / rings.PUBLIC_FILE}`; running gates use the new keys from their next order on"
    )
    if lost:
        echo(
            "orders in flight that the lost key signed stay UNKNOWN: run sds recover, then sds escalations list,"
            f" both with --gate {shlex.quote(gate)}"
        )
    if lost and made.taken_from is None:
        echo("no public key was found: the public keys in the record are trusted")


def _when(made_ms: int | None) -> str | None:
    return None if made_ms is None else when(made_ms, "seconds")

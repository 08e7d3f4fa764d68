"""`sds record move`: copy a record from the gate's file into PostgreSQL, or back."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, open_store, operator
from sds.cli.render import counted, print_either
from sds.host.clock import now_ms
from sds.host.moving import move as move_record
from sds.host.paths import gate_home, is_there, service_path
from sds.kernel.errors import UsageError

SQLITE = "sqlite"


def move(
    to: Annotated[str, typer.Option("--to", metavar="URL", help="A postgresql:// URL, or `sqlite`: the gate's file.")],
    reason: Reason,
    gate: GateOption = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Copy a halted gate's record to another store. It copies from $SDS_STORE into an empty record, compares and verifies.

    Both records stay halted. Resume only the new one, never the old one. Put a password into PGPASSWORD or ~/.pgpass.

    Example: sds record move --gate refund --to postgresql://sds@db.example/sds --reason "more machines"
    """
    if to != SQLITE and not to.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            "--to is neither `sqlite` nor the address of a PostgreSQL", hint="postgresql://USER@HOST/DATABASE"
        )
    url = None if to == SQLITE else to
    with closing(open_store(gate)) as store:
        moved = move_record(gate_home(gate), store, url, who=operator(), reason=reason, now_ms=now_ms())
    where = "without SDS_STORE" if url is None else f"with SDS_STORE={moved.to.rpartition(',')[0]}"
    lines = [
        f"{counted(moved.rows, 'row')} copied to `{moved.to}`, compared and verified: head {moved.head}",
        f"continue {where}: sds resume --gate {gate}; never resume the old record",
    ]
    if is_there(service_path()):
        lines.append(
            "keys of callers and webhooks were not copied: add them again with sds keys add and sds webhooks add"
        )
    print_either(as_json, {"rows": moved.rows, "to": moved.to, "head": str(moved.head)}, lines)

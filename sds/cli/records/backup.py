"""`sds backup` and `sds restore`: copy a gate's record with its keys and head, and restore the copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, OpenedGate, as_name, open_store, written
from sds.cli.render import print_either
from sds.definitions.definition import NAME
from sds.definitions.registry import installed, is_path
from sds.host.backup import BackupManifest, back_up
from sds.host.clock import now_ms, when
from sds.host.keys import KEY_FILE, read_public
from sds.host.paths import gate_home, is_there, service_path, store_url
from sds.host.restoring import Restored
from sds.host.restoring import restore as put_back
from sds.kernel.errors import UsageError


def backup(
    to: Annotated[
        Path, typer.Option("--to", help="The new folder, or the new file if it ends with .tar.", callback=written)
    ],
    gate: GateOption = "refund",
    with_key: Annotated[
        bool, typer.Option("--with-key", help="Include kernel.key: with it, every text can be read.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Back up a gate's record at one moment. Gates go on deciding. The copy is verified, with SHA-256 sums and the signed head.

    Example: sds backup --gate refund --to backups/refund-2026-11-27
    """
    with closing(open_store(gate)) as store:
        made = back_up(store, gate_home(gate), to, gate=gate, with_key=with_key, now_ms=now_ms())
    key = "not in it: keep a copy elsewhere, because without the key no text can be read and nothing can be decided"
    key = "in it: anyone who has the backup can read the text of every case" if with_key else key
    lines = [f"{gate}: {_what(made)}, in `{to}`", f"`{KEY_FILE}` is {key}"]
    if _has_service():
        lines.append("keys of callers and webhooks are not in it: they belong to the service, for all gates")
    print_either(as_json, made.model_dump(mode="json"), lines)


def restore(
    source: Annotated[Path, typer.Option("--from", help="The folder or .tar file that `sds backup` made.")],
    gate: OpenedGate = "refund",
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key",
            help="The keys that must have signed it: a copy of the gate's `ledger.pub`. Default: those in the gate's folder,"
            " else those in the backup.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Restore a gate's record from a backup. It verifies sums, ledger and head first, and overwrites no record that knows more.

    Example: sds restore --gate refund --from backups/refund-2026-11-27
    """
    name = as_name(gate)
    if not NAME.fullmatch(name):
        raise UsageError(f"`{name}` is not the name of a gate", hint="write a name_in_lower_case")
    public = read_public(public_key) if public_key is not None else None
    done = put_back(source, gate_home(name), gate=name, public=public)
    print_either(
        as_json, {**done.manifest.model_dump(mode="json"), "has_key": done.has_key}, _restored(name, gate, done)
    )


def _restored(gate: str, typed: str, done: Restored) -> Iterator[str]:
    yield f"{gate}: {_what(done.manifest)}, is in `{gate_home(gate)}`"
    if not done.has_key:
        yield f"put `{gate_home(gate) / KEY_FILE}` back, too: until then no text can be read and nothing can be decided"
    yield "halts, suspensions, revocations and erasures since then are undone: repeat them first"
    yield "the record lacks the decisions since then; so that nothing is paid twice, do this now, in this order:"
    definition = shlex.quote(typed) if typed in installed() or is_path(typed) else "PATH"
    if definition == "PATH":
        yield f"  (PATH: the path of the definition of `{gate}`, because no gate of this name is installed)"
    yield f"  sds recover --gate {definition}"
    yield f'  sds reconcile {definition} --adopt --reason "restored"     # if the executor offers a statement'
    yield "  send the events since then again"
    if _has_service():
        yield "keys of callers and webhooks are unchanged; answers that are not in this record are no longer given"


def _has_service() -> bool:
    """Tell whether a service has a database in the home, or may have one in the PostgreSQL of the records."""
    return is_there(service_path()) or store_url() is not None


def _what(made: BackupManifest) -> str:
    signed = "signed" if made.signed else "not signed"
    return f"up to entry {made.head.idx}, of {when(made.made_ms, 'seconds')}, {signed}"

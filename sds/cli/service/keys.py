"""`sds keys add`, `list`, `revoke`: the API keys of the service's callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from sds.cli.common import JsonFlag, as_name, named, recorded
from sds.cli.render import echo, print_either
from sds.cli.service import comma_separated, service_database
from sds.cli.service.serve import StoreUrl
from sds.definitions.registry import installed, is_path
from sds.host.clock import now_ms, when
from sds.kernel.errors import UsageError

EVERY_GATE = "all"

Named = Annotated[
    str, typer.Argument(help="The caller's name, as the record will have it.", metavar="NAME", callback=named)
]


def add(
    name: Named,
    role: Annotated[list[str], typer.Option("--role", help="submit, read, review, operate; separated by commas.")],
    gate: Annotated[list[str], typer.Option("--gate", help="The gates: names or paths separated by commas, or all.")],
    store: StoreUrl = "",
) -> None:
    """Make a key for a caller of the service. It is printed once: only its SHA-256 is kept.

    submit: ask for decisions. read: look at them. review: see texts and decide cases that wait for a human. operate: halt
    and resume gates; suspend, reactivate and retire agents.

    Example: sds keys add shop --role submit,read --gate refund
    """
    given = comma_separated(gate)
    gates = tuple(map(as_name, given))
    with service_database(store) as database:
        from sds.service import callers  # noqa: PLC0415

        _refuse_unknown(each for each in given if not is_path(each))
        chosen = (callers.ALL,) if EVERY_GATE in gates else gates
        key = callers.add_key(database, name, comma_separated(role), chosen, now_ms=now_ms())
    echo(key)


def _refuse_unknown(gates: Iterable[str]) -> None:
    """Raise UsageError for a name that no installed or recorded gate has: the key would be of no use, and its name could not
    be given to another key.
    """
    known = sorted({*installed(), *recorded()})
    strange = next((each for each in gates if each not in {EVERY_GATE, *known}), None)
    if strange is not None:
        hint = f"the gates are: {', '.join(known)}; for a gate of your own that was never opened, give its path"
        raise UsageError(f"there is no gate `{strange[:80]}`", hint=hint)


def list_keys(store: StoreUrl = "", as_json: JsonFlag = False) -> None:
    """List the keys of callers, oldest first. Revoked keys are listed, too. No key is shown, because none is kept.

    Example: sds keys list
    """
    with service_database(store) as database:
        from sds.service import callers  # noqa: PLC0415

        keys = callers.stored_keys(database)
    data: list[dict[str, Any]] = [
        {
            "name": key.name,
            "roles": list(key.roles),
            "gates": [EVERY_GATE if gate == callers.ALL else gate for gate in key.gates],
            "made": when(key.made_at_ms),
            "revoked": None if key.revoked_at_ms is None else when(key.revoked_at_ms),
        }
        for key in keys
    ]
    print_either(as_json, data, map(_line, data), none="no keys")


def _line(key: Mapping[str, Any]) -> str:
    ended = f"  revoked {key['revoked']}" if key["revoked"] else ""
    return f"{key['name']}  {','.join(key['roles'])}  {','.join(key['gates'])}  made {key['made']}{ended}"


def revoke(name: Named, store: StoreUrl = "") -> None:
    """Revoke a key for good. Running services refuse it within a second. Its name is never given again.

    Example: sds keys revoke shop
    """
    with service_database(store) as database:
        from sds.service import callers  # noqa: PLC0415

        changed = callers.revoke_key(database, name, now_ms=now_ms())
    echo(f"{name}: revoked" if changed else f"{name}: was already revoked")

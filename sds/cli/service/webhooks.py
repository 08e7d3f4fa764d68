"""`sds webhooks`: add, list and remove the endpoints that final states are sent to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from sds.cli.common import JsonFlag, as_name, named, open_store
from sds.cli.render import counted, echo, print_either
from sds.cli.service import comma_separated, service_database
from sds.cli.service.serve import StoreUrl
from sds.definitions.registry import installed
from sds.host.clock import now_ms, when
from sds.host.paths import gate_home, has_record
from sds.kernel.errors import SdsError, UsageError, cause_of

if TYPE_CHECKING:
    from sds.service.operations.endpoints import EndpointPosition

SECRET_CHARS_MAX = 200


def add(
    url: Annotated[str, typer.Argument(help="Its URL: https, or http on this machine.", metavar="URL")],
    gate: Annotated[list[str], typer.Option("--gate", help="The gates: names or paths separated by commas.")],
    name: Annotated[str, typer.Option("--name", help="Its name. Default: a generated one.")] = "",
    secret_file: Annotated[
        str, typer.Option("--secret-file", help="A file with its secret, or -. Default: a new one, which is printed.")
    ] = "",
    store: StoreUrl = "",
) -> None:
    """Add an endpoint for final states. It gets the final states of decisions from now on: signed, at least once, in order.

    Example: sds webhooks add https://shop.example/decided --gate refund
    """
    gates = dict.fromkeys(map(as_name, comma_separated(gate)))
    secret = _read_secret(secret_file) if secret_file else ""
    with service_database(store) as database, ExitStack() as opened:
        from sds.service.operations.endpoints import add_endpoint  # noqa: PLC0415

        for each in gates:
            if each in installed() and not has_record(gate_home(each)):
                message = f"gate `{each}` has no record yet, so that it has no final states from now on"
                raise UsageError(message, hint=f"start the service once: sds serve --gate {each}")
        records = {each: opened.enter_context(closing(open_store(each))) for each in gates}
        made = add_endpoint(database, url, records, name=name, secret=secret, now_ms=now_ms())
    echo(f"{made.name}  {','.join(made.gates)}")
    if not secret:
        echo(f"secret (shown this once): {made.secret}")


def list_webhooks(store: StoreUrl = "", as_json: JsonFlag = False) -> None:
    """List the endpoints. Each line has the gate, how much is undelivered, and since when and why deliveries fail.

    Example: sds webhooks list
    """
    with service_database(store) as database:
        from sds.service.operations.endpoints import endpoints, positions  # noqa: PLC0415

        where, known = {each.name: each.url for each in endpoints(database)}, positions(database)
    rows = [_facts(at, where.get(at.webhook, "")) for at in known]
    print_either(as_json, rows, map(_line, rows), none="no webhooks")


def _line(row: Mapping[str, object]) -> str:
    undelivered = row["undelivered"]
    left = "is not known" if undelivered is None else counted(int(str(undelivered)), "final state")
    failing = f"  failing since {row['failing_since']}: {row['failure']}" if row["failing_since"] else ""
    return f"{row['name']}  {row['gate']}  {row['host']}  undelivered {left}{failing}"


def remove(
    name: Annotated[str, typer.Argument(help="The endpoint's name.", metavar="NAME", callback=named)],
    store: StoreUrl = "",
) -> None:
    """Remove an endpoint. It gets nothing more, not even what is undelivered.

    Example: sds webhooks remove wh-1a2b3c4d
    """
    with service_database(store) as database:
        from sds.service.operations.endpoints import remove_endpoint  # noqa: PLC0415

        remove_endpoint(database, name)
    echo(f"{name}: removed")


def _facts(at: EndpointPosition, url: str) -> dict[str, object]:
    return {
        "name": at.webhook,
        "gate": at.gate,
        "host": urlsplit(url).hostname,  # the rest of a URL may hold a token
        "undelivered": _undelivered(at),
        "failing_since": None if at.failing_since_ms is None else when(at.failing_since_ms),
        "attempts": at.attempts,
        "failure": at.failure,
    }


def _undelivered(at: EndpointPosition) -> int | None:
    """Return how many final states an endpoint has not been sent; None where the record cannot be read."""
    from sds.service.operations.changes import final_changes  # noqa: PLC0415

    try:
        with closing(open_store(at.gate)) as record:
            return sum(1 for _ in final_changes(record, at.gate, at.idx))
    except SdsError:
        return None


def _read_secret(file: str) -> str:
    try:
        with sys.stdin if file == "-" else Path(file).open(encoding="utf-8") as opened:
            text = opened.read(SECRET_CHARS_MAX)
    except (OSError, UnicodeDecodeError) as error:
        why = cause_of(error) if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"`{file}` cannot be read: {why}", hint="name a file with a line `whsec_...`") from error
    return text.strip() or "-"

"""`sds sandbox-gateway`: a payment gateway for trying out a gate, in a process and with a file of its own."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from sds.cli.common import written
from sds.cli.render import echo, print_json
from sds.host.clock import now_ms
from sds.host.input_files import read_bytes
from sds.kernel.errors import UsageError, WorldError, cause_of
from sds.kernel.storage.private_files import make_private_file

if TYPE_CHECKING:
    from sds.executors.sandbox.server import GatewayServer

TOKEN_CHARS_MAX = 1024
_A_TOKEN = f"name a file with one line of at most {TOKEN_CHARS_MAX} characters in ASCII"


def sandbox_gateway(
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port on 127.0.0.1; 0: any free port.")] = 0,
    file: Annotated[
        Path, typer.Option("--file", help="The gateway's SQLite file. It keeps what was paid.", callback=written)
    ] = Path("gateway.db"),
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            metavar="NAME=VALUE,...",
            help="Shares (0 to 1): down, drop, fail, refuse, lose-replies, cut-replies, answer-twice; delay-ms, accept-ms, forget-keys-ms, seed.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Require the token in this file.", show_default=False)
    ] = None,
) -> None:
    """Run a payment gateway with faults. Nothing may be paid twice when it loses replies, is slow, answers twice, forgets keys.

    It prints one JSON line when it is ready, and what it paid when it ends. `GET /payments` shows that at any time.

    Example: sds sandbox-gateway --port 8099 --faults lose-replies=0.1,delay-ms=200
    """
    token = _token(token_file)
    with _opened(port, file, faults, token) as server:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: Thread(target=server.shutdown).start())
        print_json({"ready": True, "url": server.url, "port": server.server_port})
        server.serve_forever(poll_interval=0.05)
        paid = server.books.totals()
    echo(
        f"paid {paid['settled']} orders under {paid['keys']} keys, {paid['total']} in all,"
        f" declined {paid['rejected']}, keys paid twice: {len(paid['paid_twice'])}"
    )


@contextmanager
def _opened(port: int, file: Path, faults: str, token: str) -> Iterator[GatewayServer]:
    from sds.executors.sandbox.books import Books  # noqa: PLC0415  no other command needs a web server
    from sds.executors.sandbox.faults import parse_faults  # noqa: PLC0415
    from sds.executors.sandbox.server import GatewayServer  # noqa: PLC0415

    wanted = parse_faults(faults)
    with ExitStack() as opened:
        try:
            make_private_file(file)
            books = opened.enter_context(closing(Books(file, now_ms)))
        except (sqlite3.Error, OSError) as error:
            why = cause_of(error) if isinstance(error, OSError) else str(error)
            raise UsageError(f"the gateway cannot use `{file}`: {why}", hint="name another --file") from error
        try:
            server = opened.enter_context(GatewayServer(port, books, wanted, token=token))
        except OSError as error:
            raise WorldError(
                f"the gateway cannot listen on port {port}: {cause_of(error)}", hint="choose another --port"
            ) from error
        yield server


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    text = read_bytes(file, TOKEN_CHARS_MAX + 2, hint=_A_TOKEN).decode("ascii", "replace").strip()
    if not 0 < len(text) <= TOKEN_CHARS_MAX or not text.isascii():
        raise UsageError(f"`{file}` does not hold a token", hint=_A_TOKEN)
    return text

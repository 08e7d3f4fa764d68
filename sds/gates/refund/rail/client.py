"""The kernel's side of the payment rail: starts it, stops it, and pays through it without ever guessing.

Anything uncertain is `unknown`: a deadline, a closed connection, an answer that cannot be read, a rail that cannot be
reached. A refused connection is, too: this call sent nothing, but an earlier one under the same key may have.
`rejected` is only an answer of the rail itself, or an order that was never sent.
"""

from __future__ import annotations

import io
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from sds.kernel.errors import ExecutorError, StateError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.statement import StatementLine
from sds.kernel.locks import acquired

from .store import Line

REPLY_BYTES_MAX = 64 * 1024
READY_S = 15.0
STOP_S = 5.0
CONTROL_S = 5.0
RESTART_S, RESTART_S_MAX = 1.0, 60.0  # between two starts of a rail that ends by itself or hangs
HANG_S = 2.0  # a rail hangs that gives no answer for so long, even to a request that needs no file
_NO_ANSWER = (OSError, ValueError, RecursionError, HTTPException)
Exchange = Callable[[str, str, Mapping[str, object] | None, float], tuple[int, dict[str, Any]]]


class RailProcess:
    """The rail as a child process: `with RailProcess(db) as rail: rail.executor()`. It ends with the block. Safe in
    several threads.
    """

    def __init__(self, db: Path, *, ready_s: float = READY_S) -> None:
        self._db, self._ready_s = db.resolve(), ready_s
        self._child: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()  # held to start or end the process
        self._wanted, self._began_s, self._restarts, self._late = False, 0.0, 0, False
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it is ready. A second start uses the port of the first.

        Raises ExecutorError when it is not ready in time.
        """
        with self._changing:
            self._start()
            self._wanted = True

    def running_port(self, within_s: float) -> int:
        """Return the port it answers on. A process that ended by itself or hangs is restarted on any free port: its
        answers are in its file. Repeated restarts are separated by pauses that double.

        A hanging process is killed before another starts: it carries out no further request, and what it did is found
        by its key. Raises ExecutorError where it was stopped or does not run. A caller that restarts it waits up to
        `ready_s`, one that tests whether it hangs up to `HANG_S`, and others up to `within_s`.
        """
        with acquired(self._changing, max(0.0, within_s)) as free:
            if not free:
                raise ExecutorError("the payment rail does not answer: it is being started")
            if not self._wanted:
                raise ExecutorError("the payment rail does not answer: it was stopped")
            if self._late and self._hangs():
                self._end()
            if self._child is None or self._child.poll() is not None:
                self._restart()
            return self.port

    def was_late(self) -> None:
        """Note that an exchange had no answer in time: the next caller tests whether the process hangs."""
        self._late = True

    def _hangs(self) -> bool:
        self._late = False
        try:
            _exchange(self.port, "GET", "/", None, HANG_S)
        except TimeoutError:
            return True
        except _NO_ANSWER:  # it runs, or has ended
            return False
        return False

    def _restart(self) -> None:
        ran_s = time.monotonic() - self._began_s
        self._restarts = 0 if ran_s > RESTART_S_MAX else self._restarts
        if ran_s < min(RESTART_S_MAX, RESTART_S * 2.0**self._restarts):
            raise ExecutorError("the payment rail does not answer: it has ended, and will be restarted later")
        self._restarts += 1
        self._end()
        self.port = 0
        self._start()

    def _start(self) -> None:
        self._began_s = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "sds.gates.refund.rail.server",
            "--db",
            str(self._db),
            "--port",
            str(self.port),
        ]
        self._child = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[4],
            umask=0o077,  # its file lies beside the record and must be private
            start_new_session=True,  # an interrupt at the terminal is for us to handle, not for the rail
        )
        try:
            self.port = _ready_port(self._child, self._ready_s)
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """Close its standard input, which ends it; kill it if that does not."""
        with self._changing:
            self._wanted = False
            if self._child is not None and self._child.stdin is not None:
                self._child.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(STOP_S)
            self._end()

    def kill(self) -> None:
        """Kill it at once and for good, as a machine failure would."""
        with self._changing:
            self._wanted = False
            self._end()

    def _end(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def executor(self, version_of: Callable[[str], str | None] | None = None) -> RailExecutor:
        return RailExecutor(self, version_of)

    def misbehave(self, **faults: float) -> None:
        """Set the faults of the sandbox gateway from now on; without arguments, none."""
        _control(partial(_exchange, self.port), "POST", "/faults", faults)


class RailExecutor:
    """Pays through a rail, which is restarted where it has died or hangs. Safe in several threads. Idempotent, because
    the rail honours keys.

    `version_of` (the state source's) is the precondition on state that the rail does not own: an intent whose ticket
    has moved is refused before it is sent. A move between that check and the payment is not noticed.
    """

    idempotent = True

    def __init__(self, process: RailProcess, version_of: Callable[[str], str | None] | None = None) -> None:
        self.process, self._version_of = process, version_of
        self.close = process.stop

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        """Pay the intent's amount under `key`."""
        if [name for name, _ in intent.params] != ["amount"]:
            return Receipt("rejected", detail="the intent does not carry exactly one amount; nothing was sent")
        if self._version_of is not None:
            try:
                moved = self._version_of(intent.resource_key) != intent.state_version
            except StateError as error:
                return Receipt("rejected", detail=f"nothing was sent: {error}")
            if moved:
                return Receipt("rejected", detail="the ticket has changed; nothing was sent")
        order = {
            "key": key,
            "kind": intent.kind,
            "amount_minor": intent.params[0][1],
            "ticket_id": intent.resource_key,
            "dfid": intent.dfid,
        }
        return self._ask("POST", "/pay", order, key, deadline_s)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        """Ask for the outcome of `key`."""
        return self._ask("GET", f"/pay/{key}", None, key, deadline_s)

    def void(self, key: str, deadline_s: float) -> Receipt:
        """Make sure that `key` never pays: `rejected` when it is void, `settled` when it has paid before."""
        return self._ask("POST", "/void", {"key": key}, key, deadline_s)

    def revert(self, key: str, deadline_s: float) -> Receipt:
        """Take back what was paid under `key`: whole and once, however often it is asked."""
        return self._ask("POST", "/revert", {"key": key}, key, deadline_s)

    def reverted(self, key: str, deadline_s: float) -> Receipt:
        """Ask whether what was paid under `key` has been taken back."""
        return self._ask("GET", f"/revert/{key}", None, key, deadline_s)

    def statement(self, since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        """Yield every order that the rail answered in this time span, in order, as it stands now. Raises ExecutorError."""
        after = 0
        while page := _control(self._exchanged, "GET", f"/statement/{since_ms}/{until_ms}/{after}", None).get("lines"):
            for fields in page:
                line = Line(**fields)
                if line.number <= after:
                    raise ExecutorError("the payment rail lists an order twice")
                after = line.number
                yield _statement_line(line)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None, key: str, deadline_s: float) -> Receipt:
        try:
            code, data = self._exchanged(method, path, body, deadline_s)
        except ExecutorError as error:
            return Receipt("unknown", detail=str(error))
        except _NO_ANSWER as error:
            return Receipt("unknown", detail=f"no answer from the rail: {type(error).__name__}")
        return _receipt(path, code, data, key)

    def _exchanged(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Call `_exchange` on the rail's current port. Raises ExecutorError where it has none."""
        ends_s = time.monotonic() + deadline_s
        port = self.process.running_port(deadline_s)
        try:
            return _exchange(port, method, path, body, ends_s - time.monotonic())
        except TimeoutError:
            self.process.was_late()
            raise


def _statement_line(line: Line) -> StatementLine:
    return StatementLine(
        key=line.key,
        outcome=line.status,  # type: ignore[arg-type]  # the kernel checks every line of a statement
        at_ms=line.at_ms,
        amount_minor=line.amount_minor,
        reference=line.reference,
        dfid=line.dfid,
        kind=line.kind,
        params={"amount": line.amount_minor},
        resource_key=line.ticket_id,
    )


def _control(exchange: Exchange, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
    """Send a request that is no order; return the answer. Raises ExecutorError when there is none."""
    try:
        code, data = exchange(method, path, body, CONTROL_S)
    except _NO_ANSWER as error:
        raise ExecutorError(f"the payment rail does not answer: {error}") from error
    if code != 200:
        raise ExecutorError(f"the payment rail refused: {data.get('detail', code)}")
    return data


def _receipt(path: str, code: int, data: Mapping[str, Any], key: str) -> Receipt:
    """Read the rail's answer strictly: it must name this key and fit the question."""
    status, reference, detail = data.get("status"), data.get("reference"), data.get("detail")
    if path == "/pay" and code in {400, 409}:
        return Receipt("rejected", detail=str(detail)[:200])
    if code != 200 or data.get("key") != key:
        return Receipt("unknown", detail=f"the rail answered {code}, but not for this key")
    if status == "settled" and isinstance(reference, str) and reference:
        return Receipt("settled", reference=reference[:64])
    if status == "rejected":
        return Receipt("rejected", detail=str(detail)[:200])
    if status == "absent" and path.startswith(("/pay/", "/revert/")):
        return Receipt("absent")
    return Receipt("unknown", detail="the rail is still at work" if status == "pending" else "an unreadable answer")


def _exchange(
    port: int, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float
) -> tuple[int, dict[str, Any]]:
    """Send one request and return (code, object). The deadline is for the whole exchange, not for each byte.

    Raises OSError (TimeoutError past the deadline), HTTPException or ValueError for anything but a whole answer.
    """
    ends = time.monotonic() + deadline_s
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=_left(ends)) as connection:
        connection.settimeout(_left(ends))
        connection.sendall(head.encode("ascii") + content)
        received = bytearray()
        while True:
            connection.settimeout(_left(ends))
            part = connection.recv(REPLY_BYTES_MAX)
            if not part:
                break
            received += part
            if len(received) > REPLY_BYTES_MAX:
                raise ValueError("the answer is too large")
    arrived: Any = SimpleNamespace(makefile=lambda _mode: io.BytesIO(received))  # all that is asked of a socket here
    response = HTTPResponse(arrived, method=method)
    response.begin()
    data = json.loads(response.read().decode())
    if not isinstance(data, dict):
        raise ValueError("the answer is not an object")  # noqa: TRY004 - a bad answer, not a bad argument
    return response.status, data


def _left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _ready_port(child: subprocess.Popen[bytes], ready_s: float) -> int:
    """Read the port from the child's first line within `ready_s` seconds. Raises ExecutorError."""
    if child.stdout is None:
        raise ExecutorError("the payment rail has no output to read its port from")
    output, line, ends = child.stdout.fileno(), b"", time.monotonic() + ready_s
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([output], [], [], max(0.0, ends - time.monotonic()))
        if not readable:
            raise ExecutorError("the payment rail did not start in time")
        part = os.read(output, 4096)
        if not part:
            raise ExecutorError("the payment rail ended at its start")
        line += part
    return int(json.loads(line)["port"])

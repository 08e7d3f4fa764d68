"""A client that was used before a fork: no process gets a reply to another one's request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from sds.client import AsyncDecisionClient, DecisionClient
from sds.kernel.errors import UsageError
from tests.client.services import ANSWER, EVENT, KEY
from tests.submission.parts import in_a_fork

FORKED_S_MAX, TIMEOUT_S = 60, 10.0


class _Decides(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({**ANSWER, "reference": str(self.client_address[1])}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def service() -> Iterator[str]:
    """Serve answers whose reference is the port that the request came from, one for each connection."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Decides) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_forked_process_has_connections_of_its_own() -> None:
    with service() as url, DecisionClient(url, KEY, timeout_s=TIMEOUT_S) as client:
        ours = client.decide("toll", EVENT).reference
        assert ours == client.decide("toll", EVENT).reference

        def decide() -> None:
            assert ours != client.decide("toll", EVENT).reference

        assert 0 == in_a_fork(decide)
        assert ours == client.decide("toll", EVENT).reference


@pytest.mark.timeout(FORKED_S_MAX)
def test_so_it_has_with_an_event_loop() -> None:
    with service() as url, asyncio.Runner() as runner:
        client = AsyncDecisionClient(url, KEY, timeout_s=TIMEOUT_S)

        async def connection() -> str | None:
            return (await client.decide("toll", EVENT)).reference

        ours = runner.run(connection())

        def decide() -> None:
            with asyncio.Runner() as another:
                assert ours != another.run(connection())

        assert 0 == in_a_fork(decide)
        assert ours == runner.run(connection())
        runner.run(client.close())


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_client_that_was_closed_before_the_fork_is_closed_in_it() -> None:
    with DecisionClient("http://127.0.0.1:1", KEY) as client:
        pass

    def decide() -> None:
        with pytest.raises(UsageError, match="the client is closed"):
            client.decide("toll", EVENT)

    assert 0 == in_a_fork(decide)

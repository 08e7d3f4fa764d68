"""Fixtures: the sandbox gateway in a thread, and an executor that is made of the gateway file which the package brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.executors.http import HttpExecutor
from sds.executors.sandbox.server import GatewayServer
from tests.executors.gateways import connected, in_thread


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayServer]:
    with in_thread(tmp_path) as server:
        yield server


@pytest.fixture
def executor(gateway: GatewayServer, tmp_path: Path) -> Iterator[HttpExecutor]:
    with connected(tmp_path, gateway.url) as made:
        yield made

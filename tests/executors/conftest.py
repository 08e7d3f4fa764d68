"""Fixtures: the sandbox gateway in a thread, and an executor that is made of the gateway file which the package brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.executors.http import HttpExecutor
from sds.executors.sandbox.server import GatewayServer
from tests.executors.apis import ledger_service, paypal, stripe
from tests.executors.gateways import connected, in_thread


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the secrets that the files of the pages name where those say that they are."""
    monkeypatch.setenv("STRIPE_SECRET_KEY", stripe.SECRET)
    monkeypatch.setenv("LEDGER_SECRET", ledger_service.SECRET)
    monkeypatch.setenv("PAYPAL_CLIENT_ID", paypal.CLIENT_ID)
    monkeypatch.setenv("PAYPAL_CLIENT_SECRET", paypal.CLIENT_SECRET)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayServer]:
    with in_thread(tmp_path) as server:
        yield server


@pytest.fixture
def executor(gateway: GatewayServer, tmp_path: Path) -> Iterator[HttpExecutor]:
    with connected(tmp_path, gateway.url) as made:
        yield made

"""What runs beside the requests: recovery, webhooks, metrics, traces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sds.service.state import Service


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """Run the service's own work for the time of a block."""
    del service
    yield

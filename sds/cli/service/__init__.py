"""The decision service from the command line: it is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sds.kernel.errors import UsageError
from sds.models.protocol import extra_hint


@contextmanager
def needs_service() -> Iterator[None]:
    """Import what the service needs within the block. Raises UsageError where the extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"the service needs `{error.name}`", hint=extra_hint("service")) from error

"""The commands of the decision service, which need the extra `service`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sds.kernel.errors import UsageError
from sds.models.protocol import extra_hint, missing_package

if TYPE_CHECKING:
    from sds.service.database import Database


@contextmanager
def needs_service() -> Iterator[None]:
    """Run a block that imports the service. Raises UsageError where the extra is not installed."""
    try:
        yield
    except ImportError as error:
        if name := missing_package(error):
            raise UsageError(f"the service needs `{name}`", hint=extra_hint("service")) from error
        raise


@contextmanager
def service_database(store: str) -> Iterator[Database]:
    """Open the service's database in `store`, for a block, and set `SDS_STORE` to it for the records; "": the home's file.

    Raises UsageError where the extra is not installed, StoreError where the database cannot be opened.
    """
    with needs_service():
        from sds.service.database import open_database  # noqa: PLC0415  the extra

        with closing(open_database(store, durable=True)) as database:
            if store:
                os.environ["SDS_STORE"] = store
            yield database  # within `needs_service`: the block imports more of the extra


def comma_separated(given: Iterable[str]) -> tuple[str, ...]:
    """Return the values of an option that may be given several times, or with commas."""
    return tuple(part.strip() for each in given for part in each.split(","))

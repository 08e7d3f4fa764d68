"""An error of the service is of the kind that a gate of this process raises with its code."""

from __future__ import annotations

import pytest

from sds.kernel.errors import (
    ErasedError,
    EventError,
    ExecutorError,
    ModelError,
    SdsError,
    StateError,
    StoreError,
    UsageError,
    WorldError,
)
from tests.client.services import EVENT, Service, problem


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "EVENT_INVALID", EventError),
        (422, "EVENT_CONFLICT", EventError),
        (410, "ERASED", ErasedError),
        (503, "STORE_UNAVAILABLE", StoreError),
        (503, "MODEL_UNAVAILABLE", ModelError),
        (503, "STATE_UNAVAILABLE", StateError),
        (503, "EXECUTOR_REFUSED", ExecutorError),
        (503, "EVENT_INVALID", WorldError),
        (400, "STORE_UNAVAILABLE", UsageError),
    ],
)
def test_an_error_is_of_the_kind_that_a_gate_raises_with_its_code(status: int, code: str, kind: type[SdsError]) -> None:
    with Service(problem(status, code)).client() as client, pytest.raises(SdsError) as caught:
        client.decide("toll", EVENT)
    assert (kind, code) == (type(caught.value), caught.value.reason_code)

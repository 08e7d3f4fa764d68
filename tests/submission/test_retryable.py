"""Every error says whether the same event, sent again, may be answered."""

from __future__ import annotations

import pytest

from sds.kernel import errors
from sds.kernel.errors import EventError, LanguageError, SdsError, StoreError, UsageError, WorldError, unreadable


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SdsError)]
)
def test_a_callers_mistake_is_not_mended_by_sending_it_again_what_the_world_does_may_be(kind: type[SdsError]):
    expected = issubclass(kind, WorldError) and kind is not LanguageError
    assert expected == kind("x").retryable


def test_whoever_raises_knows_better():
    assert WorldError("x", retryable=False).retryable is False
    assert UsageError("x", retryable=True).retryable is True
    assert EventError("x", retryable=None).retryable is False
    assert (StoreError, False) == (type(unreadable("d")), unreadable("d").retryable)

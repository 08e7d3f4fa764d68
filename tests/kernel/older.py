"""Cases as versions before schema 3 wrote them: in clear, and recognised by a plain digest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sds.kernel.canonical import digest
from sds.kernel.context import rationale
from sds.kernel.flow import decision_record, intake


class _InClear:
    """What stands where a key is, and seals nothing."""

    def seal(self, column: str, data: bytes) -> bytes:
        return data

    def seal_text(self, column: str, text: str) -> str:
        return text


@contextmanager
def writing_in_clear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a kernel write what an older version wrote."""
    with monkeypatch.context() as then:
        then.setattr(decision_record, "key_of_case", lambda store, case: (_InClear(), None))
        then.setattr(rationale, "key_for_flow", lambda store, dfid: _InClear())
        then.setattr(decision_record, "seal_facts", lambda key, facts: dict(facts))
        then.setattr(rationale, "SEALED", "text")
        then.setattr(intake, "_trigger", lambda store, event, seen: event.original or event.body)
        then.setattr(intake, "_fingerprint", lambda store, event: digest(event.original or event.body))
        yield

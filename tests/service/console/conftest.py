"""An office for every test, and one visitor who has every role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.console.office import Office, Visitor, open_office


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    monkeypatch.delenv("SDS_STORE", raising=False)
    with open_office(tmp_path, monkeypatch.setenv) as made:
        yield made


@pytest.fixture
def ada(office: Office) -> Iterator[Visitor]:
    with Visitor(office) as visitor:
        visitor.log_in(office.key("ada"))
        yield visitor

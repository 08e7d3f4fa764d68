"""Where decisions are submitted: accounts and a bank, and an engine that thinks about one event until it may go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.testbed import Testbed
from tests.submission.parts import Thinking


@pytest.fixture
def bed(tmp_path: Path) -> Testbed:
    made = Testbed(tmp_path)
    made.open_accounts(range(200))
    return made


@pytest.fixture
def thinking() -> Iterator[Thinking]:
    made = Thinking("E0")
    yield made
    made.done.set()

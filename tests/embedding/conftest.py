"""Accounts and a bank, for gates inside programs of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.testbed import Testbed


@pytest.fixture
def bed(tmp_path: Path) -> Testbed:
    made = Testbed(tmp_path)
    made.open_accounts(range(200))
    return made

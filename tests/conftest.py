"""Fixtures that more than one folder uses, and how random tests behave: no deadline, the failing seed printed."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests.model_fixtures import (
    embedded,
    opened,
    own_checkpoint,
    own_gguf,
    own_hf,
    own_int,
    own_vino,
    single_path,
    tiny,
    tiny_folder,
    tiny_hf,
    tiny_int,
    tiny_path,
    tiny_vino,
    vocabulary,
)

__all__ = [
    "embedded",
    "opened",
    "own_checkpoint",
    "own_gguf",
    "own_hf",
    "own_int",
    "own_vino",
    "single_path",
    "tiny",
    "tiny_folder",
    "tiny_hf",
    "tiny_int",
    "tiny_path",
    "tiny_vino",
    "vocabulary",
]

# What was prepared on this machine shows in no test: each decides with the weights it names.
os.environ["SDS_CACHE"] = tempfile.mkdtemp(prefix="sds-cache-")
atexit.register(shutil.rmtree, os.environ["SDS_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands take minutes each: begun last, they would keep one worker while the others have nothing."""
    items.sort(key=lambda item: "test_readme" not in item.nodeid)


settings.register_profile(
    "sds", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("sds")

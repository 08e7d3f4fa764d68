"""Fixtures that more than one folder uses."""

from __future__ import annotations

from tests.model_fixtures import embedded, tiny, tiny_path, vocabulary

__all__ = ["embedded", "tiny", "tiny_path", "vocabulary"]

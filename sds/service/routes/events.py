"""Changes as they happen, as server-sent events."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/events", tags=["events"])

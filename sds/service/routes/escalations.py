"""Cases that wait for a human: looking, and deciding."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/escalations", tags=["escalations"])

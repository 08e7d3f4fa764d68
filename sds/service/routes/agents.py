"""Agents: looking, reactivating."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/agents", tags=["agents"])

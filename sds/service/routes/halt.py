"""Halting and resuming a gate."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/halt", tags=["halt"])

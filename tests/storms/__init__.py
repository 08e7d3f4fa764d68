"""Storms: tests that kill, stop, starve and mislead real processes: `python -m tests.storms kill --n 100`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.attack.figures import Figure

from . import clock, crash, disk, duplicates, gateway, kill, kill_serve, limits, pg_outages, served, zombie
from .ground import STORES, Ground


@dataclass(frozen=True, slots=True)
class Storm:
    """One storm. `what`: what happens in it; `sizes`: its size in CI and in full; `slow`: slow to start, so not in CI."""

    what: str
    storm: Callable[[Ground], list[Figure]]
    sizes: tuple[int, int]
    stores: tuple[str, ...] = STORES
    slow: bool = False


ALL: Mapping[str, Storm] = {
    "kill": Storm(kill.WHAT, kill.storm, (40, 5_000)),
    "kill-serve": Storm(kill_serve.WHAT, kill_serve.storm, (3, 1_000)),
    "crash": Storm(crash.WHAT, crash.storm, (14, 100_000)),
    "zombie": Storm(zombie.WHAT, zombie.storm, (6, 1_000)),
    "lost-replies": Storm(gateway.LOST, gateway.lost_replies, (30, 1_000)),
    "forgetful": Storm(gateway.FORGETFUL, gateway.forgetful, (30, 1_000)),
    "duplicates": Storm(duplicates.WHAT, duplicates.storm, (200, 1_000)),
    "duplicates-http": Storm(served.WHAT, served.storm, (60, 1_000), slow=True),
    "limits": Storm(limits.WHAT, limits.storm, (200, 100_000)),
    "disk": Storm(disk.WHAT, disk.storm, (48, 2_000), disk.STORES),
    "clock": Storm(clock.WHAT, clock.storm, (40, 2_000)),
    "pg-restarts": Storm(pg_outages.WHAT_ENDED, pg_outages.restarts, (60, 3_000), pg_outages.STORES),
    "failover": Storm(pg_outages.WHAT_LOST, pg_outages.failover, (30, 3_000), pg_outages.STORES),
}

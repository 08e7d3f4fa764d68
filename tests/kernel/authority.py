"""Withdrawing authority from outside, and giving it back: what several tests do to an agent."""

from __future__ import annotations

from sds.kernel.registry import registry
from tests.kernel.durable import World, contract

AGENT = "claims-agent"
NARROWER = (("1.0.0", "1.1.0"), ("REFUND_TICKET, GOODWILL, DENY]", "GOODWILL, DENY]"))


def suspend(world: World) -> None:
    registry.transition(world.store, AGENT, "SUSPENDED", by="operator", reason="revoked", now_ms=world.clock())


def reactivate(world: World, reason: str = "looked at it") -> None:
    registry.transition(world.store, AGENT, "ACTIVE", by="operator", reason=reason, now_ms=world.clock())


def halt(world: World, *, halted: bool = True) -> None:
    registry.set_halted(world.store, halted, by="operator", reason="test", now_ms=world.clock())


def status(world: World) -> str:
    return registry.lookup(world.store, AGENT).status  # type: ignore[union-attr]


def newer_version(world: World, *changes: tuple[str, str]) -> None:
    newer = contract(*(changes or (("1.0.0", "1.1.0"), ("Decide claims.", "Deny claims."))))
    registry.register(world.store, newer, by="registry", now_ms=world.clock())


def revoke(world: World) -> None:
    registry.revoke(world.store, world.contract.hash, who="me", reason="test", now_ms=world.clock())

"""Faults of the sandbox gateway: `lose-replies=0.1,delay-ms=200,forget-keys-ms=5000,seed=7`.

A request's fate depends on the seed, its key, and how many requests came with that key before. It does not depend on
the order of threads, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from random import Random

from sds.kernel.errors import UsageError

MS_MAX = 365 * 24 * 3_600_000
SEED_MAX = 2**63


@dataclass(frozen=True, slots=True)
class GatewayFaults:
    """Shares lie between 0 and 1; times are milliseconds.

    Before the work: `down` answers 503; `drop` closes the connection; `fail` answers 500, half of the times after the
    work; `refuse` declines a new order for good; `delay_ms` waits. After the work: `lose_replies` closes without an
    answer; `cut_replies` closes in the middle of one; `answer_twice` sends it again a moment later, where the client
    expects the answer to its next question. `accept_ms`: for so long an order is only accepted. `forget_keys_ms`: after so
    long the gateway no longer knows that a key was paid or made void; None: it never forgets.
    """

    down: float = 0.0
    drop: float = 0.0
    fail: float = 0.0
    refuse: float = 0.0
    delay_ms: int = 0
    lose_replies: float = 0.0
    cut_replies: float = 0.0
    answer_twice: float = 0.0
    accept_ms: int = 0
    forget_keys_ms: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one request."""

    down: bool
    drop: bool
    fail_before: bool
    fail_after: bool
    refuse: bool
    lose: bool
    cut: bool
    twice: bool
    delay_ms: int


def fate(faults: GatewayFaults, key: str, turn: int) -> Fate:
    """Draw the fate of the request number `turn` that names `key`."""
    rng = Random(f"{faults.seed}/{key}/{turn}")  # noqa: S311  to be repeatable, not secret
    down, drop, fail, refuse, lose, cut, twice = (rng.random() for _ in range(7))
    return Fate(
        down=down < faults.down,
        drop=drop < faults.drop,
        fail_before=fail < faults.fail / 2,
        fail_after=faults.fail / 2 <= fail < faults.fail,
        refuse=refuse < faults.refuse,
        lose=lose < faults.lose_replies,
        cut=cut < faults.cut_replies,
        twice=twice < faults.answer_twice,
        delay_ms=faults.delay_ms,
    )


NAMES = {field.name.replace("_", "-"): field.name for field in fields(GatewayFaults)}


def parse_faults(text: str) -> GatewayFaults:
    """Parse `NAME=VALUE,NAME=VALUE`; an empty text has no faults. Raises UsageError."""
    given: dict[str, object] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = each.partition("=")
        if name not in NAMES or not equals or name in given:
            raise UsageError(f"`{each}` is no fault, or given twice", hint=f"NAME=VALUE; names: {', '.join(NAMES)}")
        given[name] = value
    return read_faults(given)


def read_faults(data: Mapping[str, object]) -> GatewayFaults:
    """Read faults by name, as text or numbers. A fault that is not named, or None, is off.

    Raises UsageError.
    """
    faults = GatewayFaults()
    for name, value in data.items():
        known = name.replace("_", "-")
        if known not in NAMES:
            raise UsageError(f"there is no fault `{name[:40]}`", hint=f"faults are: {', '.join(NAMES)}")
        if value is not None:
            faults = replace(faults, **{NAMES[known]: _number(known, value)})  # type: ignore[arg-type]  # as _number says
    return faults


def _number(name: str, value: object) -> float | int:
    whole = name.endswith("-ms") or name == "seed"
    try:
        number = int(str(value)) if whole else float(str(value))
    except ValueError:
        number = -1
    most = SEED_MAX if name == "seed" else MS_MAX if whole else 1
    if not 0 <= number <= most:
        wanted = f"a whole number from 0 to {most}" if whole else "a share from 0 to 1"
        raise UsageError(f"the fault `{name}` must be {wanted}, got `{str(value)[:40]}`")
    return number

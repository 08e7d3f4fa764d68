"""No contract takes another name for what something was drawn from: a ticket that was refunded would be whole again.

What is drawn is remembered by source and field. A contract that renames either forgets it, unless its source itself shows
what was paid (`draws_settle_in: source`); then only orders in flight could be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.registry.compatibility import Refusal
from sds.kernel.storage.store import Reader

_OF_PATTERN = "substr({0}, 1, ?) = ? AND substr({0}, length({0}) - ?) = ?"
_DRAWN = f"SELECT 1 FROM resources WHERE drawn > 0 AND {_OF_PATTERN.format('resource')} LIMIT 1"
_HELD = f"SELECT 1 FROM reservations WHERE status = 'live' AND {_OF_PATTERN.format('resource')} LIMIT 1"


def refusal(store: Reader, before: Mapping[str, Any], contract: Contract) -> Refusal | None:
    """Return why a contract cannot follow a registered one (`before`, as JSON); None: it can."""
    after = contract.model_dump(mode="json")
    held = _HELD if contract.draws_settle_in == "source" else _DRAWN
    for was, now in _renamed(before, after):
        begin, _, end = was.partition("*")
        if store.row(held, (len(begin), begin, len(end) - 1, end)) is not None:
            return Refusal(
                f"what was drawn from `{was}` would be forgotten: this contract draws from `{now}` instead",
                "keep the name of the source and of the field; or let the source show what was paid, and say"
                " `draws_settle_in: source`",
            )
    return None


def _renamed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each resource that a kind drew from and does no more, with each that it draws from in its place, as patterns."""
    for was, now in _draws(before, after):
        yield from product(sorted(was - now), sorted(now - was))


def _draws(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield what each kind of both contracts draws from, an agent's and a human's."""
    for kinds_before, kinds_after in zip(_kinds(before), _kinds(after), strict=True):
        for name in sorted(kinds_before.keys() & kinds_after.keys()):
            yield _resources(before, kinds_before[name]), _resources(after, kinds_after[name])


def _kinds(contract: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return contract["kinds"], contract.get("human", {}).get("kinds", {})


def _resources(contract: Mapping[str, Any], kind: Mapping[str, Any]) -> set[str]:
    return {f"{contract['source']}:*#{path}" for path in kind["draws"]}

"""No contract forgets what was drawn: a ticket that was refunded would be whole again.

What is drawn is remembered by source and field. A contract that draws from another field or source in their place, or no
more at all, forgets it, unless its source itself shows what was paid (`draws_settle_in: source`); then only orders in flight
could be forgotten. A contract is compared with every earlier one of its gate, so that two steps do no more than one. A kind
that only the earlier one has, and one that only the later one has, may be the same kind under two names.
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

Kinds = dict[str, set[str]]  # what each kind draws from, as patterns `source:*#field`
Lost = tuple[str, str | None]  # a resource that is drawn from no more, and the one in its place


def refusal(
    store: Reader, earlier: list[Mapping[str, Any]], in_force: Mapping[str, Any], contract: Contract
) -> Refusal | None:
    """Return why a contract cannot follow the one that is in force; None: it can. `earlier`: all of its gate, as JSON. What the
    one in force draws from in another's place already is no matter: nothing was drawn when it was put in force.
    """
    after = contract.written
    held = _HELD if contract.draws_settle_in == "source" else _DRAWN
    lost = {each for before in earlier for each in _lost(before, after) - _lost(before, in_force)}
    for was, now in sorted(lost, key=str):
        begin, _, end = was.partition("*")
        if store.row(held, (len(begin), begin, len(end) - 1, end)) is not None:
            instead = f"draws from `{now}` instead" if now else "draws from it no more"
            return Refusal(
                f"what was drawn from `{was}` would be forgotten: this contract {instead}",
                "keep the name of the source and of the field; or let the source show what was paid, and say"
                " `draws_settle_in: source`",
            )
    return None


def forgets(before: Mapping[str, Any], contract: Contract) -> bool:
    """Tell whether a contract would forget what an order under an earlier one (`before`, as JSON) draws from now on."""
    return bool(_lost(before, contract.written))


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[Lost]:
    """Return what a contract draws from no more, of what an earlier one drew from; both as JSON."""
    both = list(zip(_draws(before), _draws(after), strict=True))
    return {each for was, now in both for each in (*_replaced(was, now), *_given_up(was, now))}


def _replaced(before: Kinds, after: Kinds) -> Iterator[Lost]:
    """Yield each resource that a kind drew from and does no more, with each that it draws from in its place."""
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    for was, now in (*((kind, kind) for kind in before.keys() & after.keys()), *product(gone, new)):
        yield from product(before[was] - after[now], after[now] - before[was])


def _given_up(before: Kinds, after: Kinds) -> Iterator[Lost]:
    """Yield each resource that no kind draws from any more, unless the kinds that did are gone and no other is new."""
    for resource in set[str]().union(*before.values()) - set[str]().union(*after.values()):
        if any(kind not in before or resource in before[kind] for kind in after):
            yield resource, None


def _draws(contract: Mapping[str, Any]) -> tuple[Kinds, Kinds]:
    """Return what each kind of a contract draws from: an agent's and a human's."""
    kinds, of_human = contract["kinds"], contract.get("human", {}).get("kinds", {})
    agents = {name: {f"{contract['source']}:*#{path}" for path in kind["draws"]} for name, kind in kinds.items()}
    humans = {name: {f"{contract['source']}:*#{path}" for path in kind["draws"]} for name, kind in of_human.items()}
    return agents, agents | humans

"""Compares two versions of a contract: what the new one permits that the old one did not, and the other way round.

Decisions are compared as exact sets on snapshots, first those aimed at differences, then random ones. That is a search:
it shows differences, and does not prove their absence. Settings are compared as written (`settings_diff`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from sds.kernel.contract.expressions import Tree
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import HumanSpec
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound, format_literal, meet_bounds
from sds.kernel.envelope.state import Fields
from sds.lint.intervals import Constraint
from sds.lint.settings_diff import Direction, SettingChange, changed_settings
from sds.lint.snapshots import Space, calm_envelope, draw, shrink, solved, space_of, what_matters

RANDOM_SNAPSHOTS = 1500
SOLVES = 6
_Aspect = tuple[str, str, Direction]


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """One difference in what may be decided: the kind, the aspect, the direction, before and after.

    `example`: the plainest snapshot found that shows it; `snapshots`: how many of the tried ones do. `who`: whose
    envelope it is, `agent` or `human`.
    """

    who: str
    kind: str
    aspect: str
    direction: Direction
    before: str
    after: str
    example: Fields
    snapshots: int


@dataclass(frozen=True, slots=True)
class ContractDiff:
    """Every difference found between two contracts, on so many snapshots."""

    decisions: tuple[DecisionChange, ...]
    settings: tuple[SettingChange, ...]
    snapshots: int

    @property
    def more(self) -> tuple[str, ...]:
        """The names of all that the second contract permits beyond the first; unordered differences count."""
        return tuple(
            dict.fromkeys(
                [_name(change) for change in self.decisions if change.direction != "narrower"]
                + [change.path for change in self.settings if change.direction == "wider"]
            )
        )

    @property
    def verdict(self) -> str:
        searched = f"in {self.snapshots} snapshots: a search, not a proof"
        if not self.more:
            return f"the new contract permits nothing that the old one did not ({searched})"
        return f"the new contract permits more: {', '.join(self.more)} ({searched})"


def _name(change: DecisionChange) -> str:
    who = "" if change.who == "agent" else f"{change.who}: "
    return f"{who}{change.kind} {change.aspect}"


def diff(
    a: Contract,
    b: Contract,
    rng: Random,
    *,
    real: Iterable[Fields] = (),
    random_snapshots: int = RANDOM_SNAPSHOTS,
) -> ContractDiff:
    """Compare two contracts. `real`: snapshots of the gate's own state, tried besides the found ones."""
    tried = list(real)
    found: list[DecisionChange] = []
    for who, before, after in (("agent", a, b), *((("human", as_human(a), as_human(b)),) if _human(a, b) else ())):
        pair = _Pair(who, space_of(before, after), space_of(after, before))
        snapshots = [*tried, *_snapshots(pair, rng, random_snapshots)]
        found += pair.changes(snapshots)
    return ContractDiff(tuple(found), tuple(changed_settings(a, b)), len(snapshots))


def as_human(contract: Contract) -> Contract:
    """Return the contract that binds a human who resolves an escalated case; without a section `human`, the contract itself."""
    return contract if contract.human == HumanSpec() else human_contract(contract)


def _human(*contracts: Contract) -> bool:
    return any(as_human(contract) is not contract for contract in contracts)


def human_permits_more(contract: Contract, rng: Random) -> bool | None:
    """Return whether the human section was found to widen anything; None without such a section."""
    human = as_human(contract)
    if human is contract:
        return None
    pair = _Pair("human", space_of(contract, human), space_of(human, contract))
    return any(change.direction != "narrower" for change in pair.changes(_snapshots(pair, rng, RANDOM_SNAPSHOTS)))


class _Pair:
    """Two contracts, with snapshots that have the fields of both."""

    def __init__(self, who: str, a: Space, b: Space) -> None:
        self.who, self.a, self.b = who, a, b
        self.shared = {path for path, domain in a.whole.items() if b.whole.get(path, domain) == domain}
        self.comparable = len(self.shared) == len(a.whole) and set(b.whole) >= self.shared
        self.comparable = self.comparable and all(b.whole[path] == a.whole[path] for path in self.shared)
        specs = {spec.path: spec for spec in (*a.specs, *b.specs)}
        pool = {path: tuple(dict.fromkeys((*a.pool.get(path, ()), *b.pool.get(path, ())))) for path in specs}
        self.both = Space(b.rules, b.places, tuple(specs.values()), {**a.whole, **b.whole}, pool)

    def at(self, fields: Fields) -> dict[_Aspect, tuple[str, str]]:
        """Return every difference at one snapshot, with its two sides in words."""
        one, other = calm_envelope(self.a, fields), calm_envelope(self.b, fields)
        return {} if one == other else dict(_compare(one, other))

    def changes(self, snapshots: Iterable[Fields]) -> list[DecisionChange]:
        first: dict[_Aspect, Fields] = {}
        counted: dict[_Aspect, int] = {}
        for fields in snapshots:
            for aspect in self.at(fields):
                first.setdefault(aspect, fields)
                counted[aspect] = counted.get(aspect, 0) + 1
        return [self._change(aspect, fields, counted[aspect]) for aspect, fields in sorted(first.items(), key=_order)]

    def _change(self, aspect: _Aspect, fields: Fields, snapshots: int) -> DecisionChange:

        def holds(trial: Fields) -> bool:
            return aspect in self.at(trial)

        plain = shrink(self.both, fields, holds)
        before, after = self.at(plain)[aspect]
        example = what_matters(self.both, plain, holds)
        return DecisionChange(self.who, *aspect, before, after, example, snapshots)


def _order(item: tuple[_Aspect, Fields]) -> tuple[bool, str, str]:
    (kind, what, direction), _ = item
    return direction == "narrower", kind, what


def _compare(a: DecisionEnvelope, b: DecisionEnvelope) -> Iterator[tuple[_Aspect, tuple[str, str]]]:
    for name in sorted({*a.names, *b.names}):
        yield from _compare_kinds(name, a.kind(name), b.kind(name))
    if a.rationale_chars_max != b.rationale_chars_max:
        direction: Direction = "wider" if a.rationale_chars_max < b.rationale_chars_max else "narrower"
        yield ("*", "rationale", direction), (str(a.rationale_chars_max), str(b.rationale_chars_max))


def _compare_kinds(name: str, a: KindBound | None, b: KindBound | None) -> Iterator[tuple[_Aspect, tuple[str, str]]]:
    if a is None or b is None:
        if b is not None:
            yield (name, "becomes possible", "wider"), ("not permitted", kind_in_words(b))
        if a is not None:
            yield (name, "becomes impossible", "narrower"), (kind_in_words(a), "not permitted")
        return
    ranges_a, ranges_b = dict(a.params), dict(b.params)
    fills_a, fills_b = ({fill: value for fill, *value in each.fills} for each in (a, b))
    if ranges_a.keys() != ranges_b.keys() or fills_a.keys() != fills_b.keys():
        yield (name, "numbers", "different"), (kind_in_words(a), kind_in_words(b))
        return
    for param, before in ranges_a.items():
        if before != (after := ranges_b[param]):
            yield (name, param, _of_sets(meet_bounds(before, after), before, after)), (_range(before), _range(after))
    for fill, (value, scale) in fills_a.items():
        if fills_b[fill] != [value, scale]:
            yield (name, fill, "different"), (format_literal(value, scale), format_literal(*fills_b[fill]))
    if a.reasons != b.reasons:
        common = tuple(reason for reason in a.reasons if reason in b.reasons)
        yield (name, "reasons", _of_sets(common, a.reasons, b.reasons)), (", ".join(a.reasons), ", ".join(b.reasons))


def _of_sets(common: object, a: object, b: object) -> Direction:
    """Return how set `b` compares with set `a`, given their intersection."""
    return "wider" if common == a else "narrower" if common == b else "different"


def _range(allowed: Bound) -> str:
    lo, hi = format_literal(allowed.lo, allowed.scale), format_literal(allowed.hi, allowed.scale)
    if allowed.lo == allowed.hi:
        return lo
    residue = f", {allowed.residue} modulo it" if allowed.residue else ""
    step = f" in steps of {format_literal(allowed.step, allowed.scale)}{residue}" if allowed.step > 1 else ""
    return f"{lo} to {hi}{step}"


def kind_in_words(kind: KindBound) -> str:
    numbers = [f"{name} {_range(allowed)}" for name, allowed in kind.params]
    numbers += [f"{name} {format_literal(value, scale)} (filled in)" for name, value, scale in kind.fills]
    return ", ".join(numbers) or "permitted"


def _snapshots(pair: _Pair, rng: Random, random_snapshots: int) -> list[Fields]:
    found: list[Fields] = []
    for space, other in ((pair.a, pair.b), (pair.b, pair.a)):
        aims = list(_aims(space, other, comparable=pair.comparable))
        found += [{**draw(pair.both, rng), **fields} for fields in solved(space, aims, rng, times=SOLVES)]
    return found + [draw(pair.both, rng) for _ in range(random_snapshots)]


def _aims(space: Space, other: Space, *, comparable: bool) -> Iterator[list[Constraint]]:
    """Yield constraints for snapshots where `space` permits something, preferably something that `other` does not."""
    kinds, others = space.rules.contract.kinds, other.rules.contract.kinds
    for kind, spec in kinds.items():
        anyhow = space.permitting(kind)
        permitting = [*anyhow, *space.in_force(kind)]
        yield permitting
        yield from ([*anyhow, beyond] for beyond in _beyond_spend(space, kind))
        if not comparable or kind not in others:
            continue
        for refused in ([*other.permitting(kind)], [*other.in_force(kind)]):
            if refused:
                yield [*permitting, (Tree("&&", tuple(tree for tree, _ in refused)), False)]
        for param in sorted({*spec.params} & {*others[kind].params}):
            for end, op in (("lo", "<"), ("hi", ">")):
                ends = (space.bound(kind, param, end), other.bound(kind, param, end))
                yield [*permitting, *other.permitting(kind), (Tree(op, ends), True)]
        for fill in sorted({*spec.fills} & {*others[kind].fills}):
            values = tuple(each.tree("kinds", kind, "fills", fill, "value") for each in (space, other))
            yield [*permitting, *other.permitting(kind), (Tree("!=", values), True)]


def _beyond_spend(space: Space, kind: str) -> Iterator[Constraint]:
    """Yield constraints under which a kind certainly spends more than a limit, or less than nothing: there all escalates."""
    contract = space.rules.contract
    spec = contract.kinds[kind]
    if spec.spends is None:
        return
    at = ("params", spec.spends) if spec.spends in spec.params else ("fills", spec.spends)
    ends = ("lo", "hi") if at[0] == "params" else ("value", "value")
    lo, hi = (space.tree("kinds", kind, *at, end) for end in ends)
    yield Tree("<", (hi, Tree("literal", value=0))), True
    for limit in contract.spend:
        yield Tree(">", (lo, Tree("literal", value=limit.max_minor))), True

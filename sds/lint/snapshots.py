"""Snapshots worth trying on a contract: at the boundaries in its own expressions, beyond a rule, at random.

This is a search: what it finds is real, and what it does not find proves nothing (`intervals` proves). The randomness
is passed in; equal seeds give equal snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from sds.kernel.contract.compiler import FieldSpec, Path, Rules, expressions_of
from sds.kernel.contract.expressions import Checked, Tree, check_expression
from sds.kernel.decision.safeguards import EnvelopeInputs, envelope_in_force, safeguards_of
from sds.kernel.envelope.envelope import MAGNITUDE_MAX, DecisionEnvelope
from sds.kernel.envelope.state import Fields, Value
from sds.lint.intervals import Constraint, Domain, Env, Ints, domain_of, point, propagate

if TYPE_CHECKING:
    from sds.kernel.contract.schema import Contract

LITERALS_MAX = 64
TRIES_MAX = 4
PROPAGATIONS_MAX = 60
SOLVES_MAX = 300
SHRINKS_MAX = 400
OTHERS_MAX = 32
PLAUSIBLE_MAX = 10**12  # a larger field is an extreme of the type and hardly a real case
_PLAIN_INTS = (0, 1, -1, 2, 5, 10, 60, 100, 1000, 10_000, 1_000_000)
_PLAIN_TEXTS = ("", "x")


@dataclass(frozen=True)
class Space:
    """The snapshots that a contract's declared fields allow. `pool`: interesting values, from its expressions."""

    rules: Rules
    places: Mapping[Path, Checked]
    specs: tuple[FieldSpec, ...]
    whole: Env
    pool: Mapping[str, tuple[Value, ...]]

    def tree(self, *path: str) -> Tree:
        return self.places[path].tree

    def permitting(self, kind: str, *, with_values: bool = True) -> list[Constraint]:
        """Return the constraints under which a kind is permitted and, `with_values`, each of its parameters has a value."""
        spec = self.rules.contract.kinds[kind]
        found = [(self.tree("when"), True), (self.tree("kinds", kind, "when"), True)]
        ends = [(self.bound(kind, param, "lo"), self.bound(kind, param, "hi")) for param in spec.params]
        return found + [(Tree("<=", pair), True) for pair in ends if with_values]

    def in_force(self, kind: str) -> list[Constraint]:
        """Return further constraints, under which steps and safeguards leave each parameter a value."""
        spec, found = self.rules.contract.kinds[kind], list[Constraint]()
        for name, numbers in spec.params.items():
            lo, hi = self.bound(kind, name, "lo"), self.bound(kind, name, "hi")
            limits = [Tree("path", value=path) for path, drawn in spec.draws.items() if drawn == name]
            taken = bool(limits) or spec.spends == name
            most = Tree("min", (hi, limits[0])) if limits else hi
            shifted = Tree("chain", (most, Tree("literal", value=numbers.residue)), "-")
            last = Tree("chain", (most, Tree("chain", (shifted, Tree("literal", value=numbers.step)), "%")), "-")
            found.append((Tree(">=", (last, lo)), True))
            found += [(Tree(">=", (most, Tree("literal", value=0))), True)] * taken
        return found

    def bound(self, kind: str, param: str, end: str) -> Tree:
        return self.tree("kinds", kind, "params", param, end)


def space_of(contract: Contract, *others: Contract) -> Space:
    """Return the space of a contract; its pool also has the boundary values of `others`."""
    rules = Rules(contract)
    places = places_of(contract, rules)
    trees = [checked.tree for each in others for checked in places_of(each, Rules(each)).values()]
    trees += [checked.tree for checked in places.values()]
    steps = [p.step for each in (contract, *others) for kind in each.kinds.values() for p in kind.params.values()]
    literals = _literals(trees)
    limits = [limit.max_minor for each in (contract, *others) for limit in each.spend]
    numbers = [n + near for n in (*literals, *steps, *limits) if isinstance(n, int) for near in (-1, 0, 1)]
    numbers += [-step for step in steps]
    texts = [text for text in literals if isinstance(text, str)]
    pool = {spec.path: _pool(spec, numbers, texts) for spec in rules.fields}
    return Space(rules, places, rules.fields, {spec.path: domain_of(spec) for spec in rules.fields}, pool)


def places_of(contract: Contract, rules: Rules) -> dict[Path, Checked]:
    """Return every expression of a contract by its place, also those of kinds without authority."""
    types = {spec.path: spec.kind for spec in rules.fields}
    texts: list[tuple[Path, str, str]] = [(("when",), contract.when, "bool")]
    for name, kind in sorted(contract.kinds.items()):
        texts += expressions_of(name, kind)
    return {path: check_expression(text, types) for path, text, _ in texts}


def subtrees(tree: Tree) -> Iterator[Tree]:
    yield tree
    for part in tree.parts:
        yield from subtrees(part)


def _literals(trees: Sequence[Tree]) -> list[Value]:
    literals = (each.value for tree in trees for each in subtrees(tree) if each.op == "literal")
    return list(dict.fromkeys(value for value in literals if not isinstance(value, bool)))[:LITERALS_MAX]


def _pool(spec: FieldSpec, numbers: Sequence[int], texts: Sequence[str]) -> tuple[Value, ...]:
    if spec.kind.name == "bool":
        return (True, False)
    if spec.kind.name == "string":
        return tuple(sorted(spec.kind.values)) or tuple(dict.fromkeys((*texts, *_PLAIN_TEXTS)))
    known: list[int] = [*numbers, *_PLAIN_INTS, MAGNITUDE_MAX, -MAGNITUDE_MAX, 10**8, 9 * 10**9]
    return tuple(dict.fromkeys(n for n in known if abs(n) <= MAGNITUDE_MAX))


def calm_envelope(space: Space, fields: Fields) -> DecisionEnvelope:
    """Return the envelope in force when nothing else narrows it: the agent is active, nothing is spent yet."""
    contract = space.rules.contract
    left = min((limit.max_minor for limit in contract.spend), default=None)
    calm = EnvelopeInputs(fields, agent_active=True, in_effect=True, halted=False, spend_left=left, context_whole=True)
    return envelope_in_force(space.rules.envelope(fields), calm, safeguards_of(contract))


def draw(space: Space, rng: Random) -> dict[str, Value]:
    """Draw a random snapshot: mostly values of the pool, sometimes a value near another field's, or any."""
    fields = {spec.path: rng.choice(space.pool[spec.path]) for spec in space.specs}
    numeric = [spec.path for spec in space.specs if spec.kind.name == "int"]
    for path in numeric:
        if not rng.randrange(4):
            near = int(fields[rng.choice(numeric)]) + rng.randint(-2, 2)
            fields[path] = max(-MAGNITUDE_MAX, min(MAGNITUDE_MAX, near))
        elif not rng.randrange(4):
            fields[path] = rng.randrange(10 ** rng.randint(1, 7))
    return fields


def solve(space: Space, constraints: Sequence[Constraint], rng: Random) -> dict[str, Value] | None:
    """Search a snapshot that meets the constraints: fix one field after the other, and narrow the rest accordingly.

    Fields that no constraint reads are drawn. After PROPAGATIONS_MAX the rest is guessed: the caller checks the result anyway.
    """
    reads = {str(each.value) for tree, _ in constraints for each in subtrees(tree) if each.op == "path"}
    env = propagate(constraints, space.whole)
    left = PROPAGATIONS_MAX
    for path in rng.sample(sorted(reads), len(reads)):
        if env is None:
            return None
        candidates = _candidates(env[path], space.pool[path], rng)
        tried = candidates[: max(0, min(TRIES_MAX, left))]
        left -= len(tried)
        narrowed = (propagate(constraints, {**env, path: point(value)}, rounds=1) for value in tried)
        found = next((each for each in narrowed if each is not None), None)
        env = {**env, path: point(candidates[0])} if candidates and not tried else found
    return None if env is None else {**draw(space, rng), **{path: _only(env[path]) for path in reads}}


def solved(
    space: Space, aims: Sequence[Sequence[Constraint]], rng: Random, *, times: int
) -> Iterator[dict[str, Value]]:
    """Yield the result of `solve` for each aim, `times` times, at most SOLVES_MAX in all; every aim once before any twice."""
    for constraints in islice((each for _ in range(times) for each in aims), SOLVES_MAX):
        found = solve(space, constraints, rng)
        if found is not None:
            yield found


def _candidates(domain: Domain, pool: Sequence[Value], rng: Random) -> list[Value]:
    if not isinstance(domain, Ints):
        found = sorted(pool if domain.items is None else domain.items, key=str)
        return rng.sample(found, min(TRIES_MAX, len(found)))
    inside = [n for n in pool if isinstance(n, int) and domain.lo <= n <= domain.hi and abs(n) <= PLAUSIBLE_MAX]
    ends = [n for n in (domain.lo, domain.hi, domain.lo + 1, domain.hi - 1) if domain.lo <= n <= domain.hi]
    known = rng.sample(inside, min(TRIES_MAX - 2, len(inside))) + rng.sample(ends, min(2, len(ends)))
    ordered = sorted(dict.fromkeys(known), key=lambda n: abs(n) > PLAUSIBLE_MAX)
    return [*ordered]


def _only(domain: Domain) -> Value:
    return domain.lo if isinstance(domain, Ints) else min(domain.items or {""}, key=str)


def shrink(space: Space, fields: Fields, holds: Callable[[Fields], bool]) -> dict[str, Value]:
    """Return the plainest snapshot found near `fields` for which `holds` is still true."""
    plain, left = dict(fields), SHRINKS_MAX
    for spec in space.specs:
        plainer = _plainer(plain[spec.path], space.pool[spec.path])
        while plainer and left > 0:
            value = plainer.pop(0)
            left -= 1
            if holds({**plain, spec.path: value}):
                plain[spec.path] = value
                plainer = _plainer(value, space.pool[spec.path])
    return plain


def what_matters(space: Space, fields: Fields, holds: Callable[[Fields], bool]) -> dict[str, Value]:
    """Return the fields whose values `holds` depends on, as far as other values of the pool show it."""
    matters: dict[str, Value] = {}
    for spec in space.specs:
        others = space.pool[spec.path][:OTHERS_MAX]
        if not all(holds({**fields, spec.path: other}) for other in others):
            matters[spec.path] = fields[spec.path]
    return matters


def _plainer(value: Value, pool: Sequence[Value]) -> list[Value]:
    """Return plainer values, the plainest first: smaller numbers, or earlier texts of the pool."""
    if isinstance(value, bool | str):
        return list(pool[: pool.index(value)] if value in pool else pool)
    half = value // 2 if value > 0 else -(-value // 2)
    smaller = {n for n in (*pool, half) if isinstance(n, int) and abs(n) < abs(value)}
    ordered = sorted(smaller, key=lambda n: (abs(n), n < 0))
    return [*ordered]

"""Finds what a contract's policy does by mistake: lines that never fire, and proposals that are not permitted.

Lines are read in order for every combination of readings. Intervals prove that a line never fires, or is never
permitted. Where policy and envelope disagree was found on a snapshot, which is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from sds.kernel.contract.expressions import READING, Tree, check_expression
from sds.kernel.contract.policy import PolicyRules, Proposed, kind_of, policy_rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.state import Fields, Value
from sds.lint.finding import Finding, in_words
from sds.lint.intervals import Constraint, Domain, Ints, Values, point, propagate
from sds.lint.snapshots import PLAUSIBLE_MAX, Space, shrink, solved, subtrees, what_matters

PROOFS_MAX = 4_000
SOLVES = 6
MILLION = 10**6


@dataclass(frozen=True)
class _Look:
    """A policy, and its contract's space with the readings as additional fields."""

    contract: Contract
    rules: PolicyRules
    space: Space
    whens: Sequence[Tree]
    params: Sequence[Mapping[str, Tree]]

    def fires(self, index: int) -> list[Constraint]:
        """Return the constraints under which a line is the first that holds."""
        return [*((tree, False) for tree in self.whens[:index]), (self.whens[index], True)]

    def strays(self, index: int) -> Iterator[Constraint]:
        """Yield constraints that move a parameter of a line out of its bounds, or to either side of a condition in it."""
        kind = str(self.contract.policy[index].kind)
        for name, tree in self.params[index].items():
            yield Tree("<", (tree, self.space.bound(kind, name, "lo"))), True
            yield Tree(">", (tree, self.space.bound(kind, name, "hi"))), True
            for each in subtrees(tree):
                if each.op == "?":
                    yield from ((each.parts[0], held) for held in (True, False))

    def proposed(self, fields: Fields) -> Proposed | None:
        """Return the policy's proposal for fields that include the readings; None where it fails."""
        readings = {path.removeprefix(READING): value for path, value in fields.items() if path.startswith(READING)}
        state = {path: value for path, value in fields.items() if not path.startswith(READING)}
        try:
            return self.rules.propose(state, readings)
        except Exception:  # noqa: BLE001  failures are another finding
            return None

    def forbidden(self, fields: Fields) -> bool:
        """Return whether the policy proposes here what the envelope does not permit."""
        proposed = self.proposed(fields)
        if proposed is None or self.contract.kinds.get(proposed.action) is None:
            return False
        state = {path: value for path, value in fields.items() if not path.startswith(READING)}
        permitted = self.space.rules.envelope(state).kind(proposed.action)
        if permitted is None:
            return True
        bounds = dict(permitted.params)
        return any(value not in bounds[name] for name, value in proposed.params)


def policy_findings(contract: Contract, space: Space, rng: Random) -> list[Finding]:
    """Return the findings of a contract's policy; [] without one. `space`: the contract's snapshots."""
    if not contract.policy:
        return []
    look = _look(contract, space)
    found = [*_unused(look), *_never(look)]
    hopeless = {finding.path[1] for finding in found if finding.rule.startswith("policy-line")}
    always = (None, ESCALATE, contract.refusal)  # never forbidden
    lines = [index for index, line in enumerate(contract.policy) if line.kind not in always]
    asked = (_disagreement(look, index, rng) for index in lines if index not in hopeless)
    return [*found, *filter(None, asked)]


def _look(contract: Contract, space: Space) -> _Look:
    rules = policy_rules(contract)
    types = {spec.path: spec.kind for spec in space.specs}
    types |= {f"{READING}{name}": kind_of(spec) for name, spec in contract.readings.items()}
    whens = [check_expression(line.when, types).tree for line in contract.policy]
    params = [
        {name: check_expression(text, types).tree for name, text in line.params.items()} for line in contract.policy
    ]
    trees = (*whens, *(tree for each in params for tree in each.values()))
    numbers = [each.value for tree in trees for each in subtrees(tree) if type(each.value) is int]
    near = [int(number) + step for number in numbers for step in (-1, 0, 1)]
    domains: dict[str, Domain] = {}
    pool: dict[str, tuple[Value, ...]] = {
        path: tuple(dict.fromkeys((*known, *near))) if types[path].name == "int" else known
        for path, known in space.pool.items()
    }
    for name, spec in contract.readings.items():
        values = tuple(spec.values)
        domains[f"{READING}{name}"] = Values(frozenset(values)) if values else Ints(0, MILLION)
        pool[f"{READING}{name}"] = values or tuple(n for n in dict.fromkeys((0, MILLION, *near)) if 0 <= n <= MILLION)
    return _Look(contract, rules, replace(space, whole={**space.whole, **domains}, pool=pool), whens, params)


def _unused(look: _Look) -> Iterator[Finding]:
    inputs = {path for spec in look.contract.readings.values() for path in spec.score}
    for name in look.contract.readings:
        if f"{READING}{name}" not in look.rules.reads | inputs:
            message = f"no line of the policy uses `reading.{name}`"
            yield Finding("reading-unused", "warning", ("readings", name), message, "remove the reading, or use it")


def _never(look: _Look) -> Iterator[Finding]:
    """Yield the lines that no snapshot and reading reaches, or whose proposal no snapshot permits."""
    for index, line in enumerate(look.contract.policy):
        if line.otherwise is not None:
            continue
        if not _possible(look, look.fires(index)):
            message = (
                "this line never applies (proven by intervals): earlier lines apply in every case in which it holds"
            )
            hint = "remove the line, or move it up"
            yield Finding("policy-line-never", "error", ("policy", index), message, hint)
        elif line.kind not in (None, ESCALATE, look.contract.refusal) and not _possible(
            look, [*look.fires(index), *look.space.permitting(str(line.kind))]
        ):
            message = f"`{line.kind}` is never permitted where this line applies (proven by intervals): the line only escalates"
            yield Finding(
                "policy-line-forbidden",
                "error",
                ("policy", index),
                message,
                "compare the line's `when` with that of the kind",
            )


def _possible(look: _Look, constraints: Sequence[Constraint]) -> bool:
    """Return whether some combination of readings leaves a snapshot. With too many combinations, they are checked together."""
    spaces = list(_combinations(look)) if _count(look) * len(look.whens) <= PROOFS_MAX else [look.space.whole]
    return any(propagate(constraints, env) is not None for env in spaces)


def _count(look: _Look) -> int:
    count = 1
    for spec in look.contract.readings.values():
        count *= max(1, len(spec.values))
    return count


def _combinations(look: _Look) -> Iterator[Mapping[str, Domain]]:
    named = [(f"{READING}{name}", spec.values) for name, spec in look.contract.readings.items() if spec.values]
    for values in product(*(values for _, values in named)):
        fixed = {path: point(value) for (path, _), value in zip(named, values, strict=True)}
        yield {**look.space.whole, **fixed}


def _disagreement(look: _Look, index: int, rng: Random) -> Finding | None:
    kind = str(look.contract.policy[index].kind)

    def holds(fields: Fields) -> bool:
        if any(type(value) is int and abs(value) > PLAUSIBLE_MAX for value in fields.values()):
            return False  # where a sum overflows nothing is permitted, which is no fault of the line
        proposed = look.proposed(fields)
        return proposed is not None and proposed.line == index and look.forbidden(fields)

    beyond = [*((tree, False) for tree, _ in look.space.permitting(kind)), *look.strays(index)]
    aims = [look.fires(index), *([*look.fires(index), each] for each in beyond)]
    shown = next((fields for fields in solved(look.space, aims, rng, times=SOLVES) if holds(fields)), None)
    if shown is None:
        return None
    asked = {str(each.value) for each in subtrees(look.whens[index]) if each.op == "path"}
    readings = {path: value for path, value in shown.items() if path.startswith(READING) and path in asked}
    matters = {**what_matters(look.space, shrink(look.space, shown, holds), holds), **readings}
    message = f"proposes `{kind}`, which is not permitted, when {in_words(matters)}: then a human decides"
    return Finding(
        "policy-forbidden", "warning", ("policy", index), message, "exclude this case in the line's `when`", matters
    )

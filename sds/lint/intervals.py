"""Interval analysis of the typed subset: an expression's possible values, and when it can hold, for all snapshots at once.

Everything here over-approximates. `of` contains every value of an evaluation without failure; `assume` never rules out
a snapshot for which the expression has the wanted value. So None from either is a proof that the expression always
fails, or never holds. Any other result proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from sds.kernel.contract.compiler import FieldSpec
from sds.kernel.contract.expressions import INT_MAX, Tree
from sds.kernel.envelope.envelope import MAGNITUDE_MAX
from sds.kernel.envelope.state import Value

STEPS_MAX = 5_000
ROUNDS_MAX = 4
CHAIN_PARTS_MAX = 8
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}


@dataclass(frozen=True, slots=True)
class Ints:
    """All integers from `lo` to `hi`."""

    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Values:
    """A set of texts or truth values; None is any text."""

    items: frozenset[bool | str] | None


Domain = Ints | Values
Env = Mapping[str, Domain]
Constraint = tuple[Tree, bool]
_ALL = Ints(-INT_MAX - 1, INT_MAX)
_EITHER = Values(frozenset({True, False}))


def domain_of(spec: FieldSpec) -> Domain:
    """Return every value that a declared field may have."""
    if spec.kind.name == "int":
        return Ints(-MAGNITUDE_MAX, MAGNITUDE_MAX)
    return _EITHER if spec.kind.name == "bool" else Values(frozenset(spec.kind.values) or None)


def point(value: Value) -> Domain:
    return Values(frozenset({value})) if isinstance(value, bool | str) else Ints(value, value)


def propagate(constraints: Sequence[Constraint], env: Env, *, rounds: int = ROUNDS_MAX) -> Env | None:
    """Return `env` narrowed by constraints that must all hold without failure; None proves that they cannot."""
    for _ in range(rounds):
        before = env
        for tree, wanted in constraints:
            narrowed = assume(tree, env, wanted)
            if narrowed is None:
                return None
            env = narrowed
        if env == before:
            return env
    return env


def of(tree: Tree, env: Env) -> Domain | None:
    """Return the possible values of an expression; None proves that it always fails."""
    return _Analysis().of(tree, env)


def assume(tree: Tree, env: Env, wanted: bool) -> Env | None:
    """Return `env` narrowed to where a truth value is `wanted`; None proves that it never is."""
    return _Analysis().assume(tree, env, wanted)


class _Analysis:
    """One analysis. After STEPS_MAX steps it narrows no further, which is sound."""

    def __init__(self) -> None:
        self.steps_left = STEPS_MAX

    def of(self, tree: Tree, env: Env) -> Domain | None:
        match tree.op:
            case "literal":
                return point(tree.value)
            case "path":
                return env[str(tree.value)]
            case "?":
                return self._either(tree, env)
            case "chain" | "neg" | "min" | "max":
                return self._number(tree, env)
        return _EITHER

    def _either(self, tree: Tree, env: Env) -> Domain | None:
        condition, *sides = tree.parts
        found: Domain | None = None
        for wanted, side in zip((True, False), sides, strict=True):
            narrowed = self.assume(condition, env, wanted)
            value = None if narrowed is None else self.of(side, narrowed)
            found = value if found is None else found if value is None else _hull(found, value)
        return found

    def _number(self, tree: Tree, env: Env) -> Ints | None:
        parts = [self.of(part, env) for part in tree.parts]
        numbers = [part for part in parts if isinstance(part, Ints)]
        if len(numbers) < len(parts):
            return None
        first, *others = numbers
        if tree.op == "neg":
            return _within(-first.hi, -first.lo)
        if tree.op in ("min", "max"):
            pick = min if tree.op == "min" else max
            return Ints(pick(first.lo, others[0].lo), pick(first.hi, others[0].hi))
        found: Ints | None = first
        for operator, other in zip(str(tree.value), others, strict=True):
            found = None if found is None else _arithmetic(operator, found, other)
        return found

    def assume(self, tree: Tree, env: Env, wanted: bool) -> Env | None:
        self.steps_left -= 1
        if self.steps_left < 0:
            return env
        match tree.op:
            case "literal":
                return env if tree.value is wanted else None
            case "path":
                return narrow(tree, Values(frozenset({wanted})), env)
            case "!":
                return self.assume(tree.parts[0], env, not wanted)
            case "&&" | "||":
                return self._logical(tree, env, wanted)
            case "?":
                condition, yes, no = tree.parts
                return _join(
                    self._both(condition, True, yes, env, wanted), self._both(condition, False, no, env, wanted)
                )
            case "in":
                return self._member(tree, env, wanted)
        return self._relation(tree.op if wanted else _OPPOSITE[tree.op], tree.parts, env)

    def _both(self, condition: Tree, held: bool, side: Tree, env: Env, wanted: bool) -> Env | None:
        narrowed = self.assume(condition, env, held)
        return None if narrowed is None else self.assume(side, narrowed, wanted)

    def _logical(self, tree: Tree, env: Env, wanted: bool) -> Env | None:
        """Go through the sides in order: either all have the usual value, or the first with the other value settles it."""
        usual = tree.op == "&&"
        settled: Env | None = None
        so_far: Env | None = env
        for side in tree.parts:
            if so_far is None:
                break
            if wanted is not usual:
                settled = _join(settled, self.assume(side, so_far, wanted))
            so_far = self.assume(side, so_far, usual)
        return so_far if wanted is usual else settled

    def _relation(self, op: str, parts: Sequence[Tree], env: Env) -> Env | None:
        left, right = parts
        a, b = self.of(left, env), self.of(right, env)
        if isinstance(a, Ints) and isinstance(b, Ints):
            return self._ordered(op, left, a, right, b, env)
        if not isinstance(a, Values) or not isinstance(b, Values):
            return None
        if op == "==":
            common = _meet(a, b)
            narrowed = None if common is None else narrow(left, common, env)
            return None if narrowed is None or common is None else narrow(right, common, narrowed)
        narrowed = _without(left, a, b, env)
        return None if narrowed is None else _without(right, b, a, narrowed)

    def _ordered(self, op: str, left: Tree, a: Ints, right: Tree, b: Ints, env: Env) -> Env | None:
        match op:
            case "<" | "<=":
                gap = int(op == "<")
                return self._pair(
                    left, Ints(a.lo, min(a.hi, b.hi - gap)), right, Ints(max(b.lo, a.lo + gap), b.hi), env
                )
            case ">" | ">=":
                return self._ordered("<" if op == ">" else "<=", right, b, left, a, env)
            case "==":
                both = Ints(max(a.lo, b.lo), min(a.hi, b.hi))
                return self._pair(left, both, right, both, env)
        return self._pair(left, _trimmed(a, b), right, _trimmed(b, a), env)

    def _pair(self, left: Tree, a: Ints, right: Tree, b: Ints, env: Env) -> Env | None:
        if a.lo > a.hi or b.lo > b.hi:
            return None
        narrowed = self._backwards(left, a, env)
        return None if narrowed is None else self._backwards(right, b, narrowed)

    def _backwards(self, tree: Tree, target: Ints, env: Env) -> Env | None:
        """Narrow the fields in a number that must lie within `target`."""
        match tree.op:
            case "neg":
                return self._backwards(tree.parts[0], Ints(-target.hi, -target.lo), env)
            case "min" | "max":
                bounded = Ints(target.lo, _ALL.hi) if tree.op == "min" else Ints(_ALL.lo, target.hi)
                return self._pair(tree.parts[0], bounded, tree.parts[1], bounded, env)
            case "chain" if set(str(tree.value)) <= {"+", "-"} and len(tree.parts) <= CHAIN_PARTS_MAX:
                return self._sum_backwards(tree, target, env)
            case "chain" if len(tree.parts) == 2 and tree.parts[1].op == "literal":
                source = _preimage(str(tree.value), target, int(tree.parts[1].value))
                return env if source is None else self._backwards(tree.parts[0], source, env)
        return narrow(tree, target, env)

    def _sum_backwards(self, tree: Tree, target: Ints, env: Env) -> Env | None:
        signs = [1, *(1 if operator == "+" else -1 for operator in str(tree.value))]
        found: Env | None = env
        for i, part in enumerate(tree.parts):
            lo, hi = target.lo, target.hi
            for j, other in enumerate(tree.parts):
                value = self.of(other, env) if j != i else Ints(0, 0)
                if not isinstance(value, Ints):
                    return None
                ends = (signs[j] * value.lo, signs[j] * value.hi)
                lo, hi = lo - max(ends), hi - min(ends)
            wanted = Ints(lo, hi) if signs[i] > 0 else Ints(-hi, -lo)
            found = None if found is None or lo > hi else self._backwards(part, wanted, found)
        return found

    def _member(self, tree: Tree, env: Env, wanted: bool) -> Env | None:
        left, *items = tree.parts
        if not wanted:
            outside: Env | None = env
            for item in items:
                outside = None if outside is None else self._relation("!=", (left, item), outside)
            return outside
        found: Env | None = None
        for item in items:
            found = _join(found, self._relation("==", (left, item), env))
        return found


def narrow(tree: Tree, to: Domain, env: Env) -> Env | None:
    """Narrow a field to `to`. Other trees leave `env` unchanged, but a literal outside `to` gives None."""
    if tree.op == "literal":
        return env if _meet(point(tree.value), to) is not None else None
    if tree.op != "path":
        return env
    path = str(tree.value)
    common = _meet(env[path], to)
    return None if common is None else env if common == env[path] else {**env, path: common}


def _meet(a: Domain, b: Domain) -> Domain | None:
    if isinstance(a, Ints) and isinstance(b, Ints):
        lo, hi = max(a.lo, b.lo), min(a.hi, b.hi)
        return Ints(lo, hi) if lo <= hi else None
    if isinstance(a, Values) and isinstance(b, Values):
        if a.items is None or b.items is None:
            return b if a.items is None else a
        return Values(a.items & b.items) if a.items & b.items else None
    return None


def _hull(a: Domain, b: Domain) -> Domain:
    if isinstance(a, Ints) and isinstance(b, Ints):
        return Ints(min(a.lo, b.lo), max(a.hi, b.hi))
    if isinstance(a, Values) and isinstance(b, Values):
        return Values(None if a.items is None or b.items is None else a.items | b.items)
    raise TypeError("an expression has one type")


def _join(a: Env | None, b: Env | None) -> Env | None:
    if a is None or b is None:
        return b if a is None else a
    if a is b:
        return a
    return {path: domain if (other := b[path]) is domain else _hull(domain, other) for path, domain in a.items()}


def _without(tree: Tree, mine: Values, other: Values, env: Env) -> Env | None:
    """Narrow by `!=`: remove the other side's value, if it has exactly one."""
    if mine.items is None or other.items is None or len(other.items) != 1:
        return env
    left = mine.items - other.items
    return narrow(tree, Values(left), env) if left else None


def _trimmed(a: Ints, b: Ints) -> Ints:
    if b.lo != b.hi:
        return a
    return Ints(a.lo + (a.lo == b.lo), a.hi - (a.hi == b.lo))


def _within(lo: int, hi: int) -> Ints | None:
    """Return the part of a range within 64 bits; an evaluation beyond them fails."""
    lo, hi = max(lo, _ALL.lo), min(hi, _ALL.hi)
    return Ints(lo, hi) if lo <= hi else None


def _arithmetic(operator: str, a: Ints, b: Ints) -> Ints | None:
    match operator:
        case "+":
            return _within(a.lo + b.lo, a.hi + b.hi)
        case "-":
            return _within(a.lo - b.hi, a.hi - b.lo)
        case "*":
            corners = [x * y for x, y in product((a.lo, a.hi), (b.lo, b.hi))]
            return _within(min(corners), max(corners))
    divisors = [d for d in (b.lo, b.hi, -1, 1) if d and b.lo <= d <= b.hi]
    if not divisors:
        return None
    if operator == "/":
        corners = [truncated(x, d) for x, d in product((a.lo, a.hi), divisors)]
        return _within(min(corners), max(corners))
    most = max(map(abs, divisors)) - 1
    return Ints(max(-most, a.lo) if a.lo < 0 else 0, min(most, a.hi) if a.hi > 0 else 0)


def truncated(a: int, b: int) -> int:
    """Divide as CEL does, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _preimage(operator: str, target: Ints, factor: int) -> Ints | None:
    """Return the numbers that give `target` when multiplied or divided by a positive literal; None where that is not known."""
    if factor <= 0:
        return None
    if operator == "*":
        return Ints(-(-target.lo // factor), target.hi // factor)
    if operator == "/":
        lo = target.lo * factor - (factor - 1 if target.lo <= 0 else 0)
        return Ints(lo, target.hi * factor + (factor - 1 if target.hi >= 0 else 0))
    return None

"""Interval analysis never rules out what happens: None is a proof, anything else a hint."""

from __future__ import annotations

from random import Random

import pytest

from sds.kernel.contract.compiler import FieldSpec, Program
from sds.kernel.contract.expressions import BOOL, INT, INT_MAX, STRING, Kind, Tree, check_expression
from sds.kernel.envelope.state import Value
from sds.lint.intervals import Env, Ints, Values, assume, domain_of, of, point, propagate
from tests.scale import scale, seeded

TYPES = {
    "a.b": BOOL,
    "a.c": BOOL,
    "a.n": INT,
    "a.m": INT,
    "a.s": STRING,
    "a.e": Kind("string", frozenset({"rain", "snow", "fog"})),
}
WHOLE: Env = {path: domain_of(FieldSpec(path, kind)) for path, kind in TYPES.items()}


def tree(text: str) -> Tree:
    return check_expression(text, TYPES).tree


@pytest.mark.parametrize(
    "text",
    [
        "a.n > 5 && a.n < 3",
        "a.n > 5 && a.n < 7 && a.n != 6",
        "a.n > a.m && a.m >= 4 && a.n <= 4",
        "a.n + 5 < 3 && a.n >= 0",
        "a.n * 2 == 5",
        "a.n / 2 >= 500 && a.n < 1000",
        "a.n % 3 > 2",
        "min(a.n, a.m) > 7 && a.m < 7",
        "max(a.n, 3) < 3",
        "-a.n > 3 && a.n > 0",
        "a.b && !a.b",
        "!(a.b || a.n < 4) && a.n < 4",
        "a.e == 'rain' && a.e == 'snow'",
        "a.e != 'rain' && a.e != 'snow' && a.e != 'fog'",
        "a.e in ['rain', 'snow'] && !(a.e in ['snow', 'rain'])",
        "a.s == 'x' && a.s == 'y'",
        "(a.b ? a.n > 3 : a.n > 4) && a.n < 2",
        "(a.b ? 1 : 2) > 2",
        "1 / 0 == 1",
        f"a.n + {INT_MAX} > 0 && a.n > 0",
        "a.n in [1, 2] && a.n > 2",
        "false",
    ],
)
def test_a_contradiction_is_proven(text: str):
    assert propagate([(tree(text), True)], WHOLE) is None


@pytest.mark.parametrize(
    ("text", "path", "domain"),
    [
        ("a.n > 5 && a.n <= 9", "a.n", Ints(6, 9)),
        ("a.n == a.m && a.m in [3, 5]", "a.n", Ints(3, 5)),
        ("a.n / 2 == 500", "a.n", Ints(1000, 1001)),
        ("a.n * 3 <= 10 && a.n >= 0", "a.n", Ints(0, 3)),
        ("a.n - a.m == 2 && a.m in [1, 2]", "a.n", Ints(3, 4)),
        ("a.b", "a.b", Values(frozenset({True}))),
        ("a.e != 'rain'", "a.e", Values(frozenset({"snow", "fog"}))),
        ("a.s == 'x' || a.s == 'y'", "a.s", Values(frozenset({"x", "y"}))),
    ],
)
def test_a_condition_narrows_the_fields_it_reads(text: str, path: str, domain: Ints | Values):
    narrowed = propagate([(tree(text), True)], WHOLE)
    assert narrowed is not None
    assert domain == narrowed[path]


def test_conditions_that_multiply_are_given_up_on_and_not_waited_for():
    deep = "a.n > 0"
    for _ in range(30):
        deep = f"({deep}) ? a.b : a.c"
    assert assume(tree(deep), WHOLE, True) is not None


def test_what_happens_is_never_ruled_out():
    rng, held, failed = seeded(31), 0, 0
    for _ in range(scale(1_000, 20_000)):
        kind = rng.choice(("bool", "int"))
        checked = check_expression(_random(rng, kind, 4), TYPES)
        program = Program((checked,))
        env = {path: _some_of(rng, path) for path in TYPES}
        fields = {path: _value_in(rng, path, domain) for path, domain in env.items()}
        try:
            value = program.evaluate(fields)[0]
        except Exception:  # noqa: BLE001  a failure gives no value to be ruled out
            failed += 1
            continue
        found = of(checked.tree, env)
        assert found is not None, checked.cel
        assert _holds(found, value), (checked.cel, fields, value, found)
        if kind == "bool":
            assert isinstance(value, bool)
            narrowed = propagate([(checked.tree, value)], env)
            assert narrowed is not None, (checked.cel, fields)
            assert all(_holds(narrowed[path], field) for path, field in fields.items()), (checked.cel, fields)
            held += value
    assert held > 100
    assert failed > 0


def _holds(domain: Ints | Values, value: object) -> bool:
    if isinstance(domain, Ints):
        return isinstance(value, int) and domain.lo <= value <= domain.hi
    return domain.items is None or value in domain.items


def _some_of(rng: Random, path: str) -> Ints | Values:
    if TYPES[path] is not INT or not rng.randrange(4):
        return WHOLE[path]
    lo = rng.randint(-9, 9)
    return Ints(lo, lo + rng.randrange(9)) if rng.randrange(3) else point(lo)  # type: ignore[return-value]


def _value_in(rng: Random, path: str, domain: Ints | Values) -> Value:
    if isinstance(domain, Ints):
        return rng.choice((domain.lo, domain.hi, rng.randint(domain.lo, domain.hi)))
    return rng.choice(sorted(domain.items or {"x", "y"}, key=str))


def _random(rng: Random, kind: str, depth: int) -> str:
    if depth and not rng.randrange(7):
        sides = (_random(rng, kind, depth - 1), _random(rng, kind, depth - 1))
        return f"({_random(rng, 'bool', depth - 1)} ? {sides[0]} : {sides[1]})"
    if kind == "int":
        return _random_int(rng, depth)
    return _random_bool(rng, depth)


def _random_int(rng: Random, depth: int) -> str:
    if not depth or not rng.randrange(3):
        return rng.choice(("a.n", "a.m", str(rng.randint(0, 9)), "-3", "100", str(INT_MAX)))
    left, right = _random(rng, "int", depth - 1), _random(rng, "int", depth - 1)
    if not rng.randrange(4):
        return f"{rng.choice(('min', 'max'))}({left}, {right})"
    if not rng.randrange(6):
        return f"-({left})"
    third = f" {rng.choice('+-')} {_random(rng, 'int', depth - 1)}" if not rng.randrange(3) else ""
    return f"({left} {rng.choice('++--*/%')} {right}{third})"


def _random_bool(rng: Random, depth: int) -> str:
    if not depth:
        return rng.choice(("a.b", "a.c", "a.n > 3", "a.m == a.n", "a.e == 'rain'", "a.s != 'x'", "true"))
    match rng.randrange(6):
        case 0:
            return f"!({_random(rng, 'bool', depth - 1)})"
        case 1:
            return f"(({_random(rng, 'bool', depth - 1)}) == ({_random(rng, 'bool', depth - 1)}))"
        case 2:
            return f"({_random(rng, 'int', depth - 1)}) in [{_random(rng, 'int', depth - 1)}, 4, a.m]"
        case 3:
            sides = [f"({_random(rng, 'bool', depth - 1)})" for _ in range(rng.randint(2, 3))]
            return f"({rng.choice((' && ', ' || ')).join(sides)})"
    operator = rng.choice(("==", "!=", "<", "<=", ">", ">="))
    return f"({_random(rng, 'int', depth - 1)} {operator} {_random(rng, 'int', depth - 1)})"

"""Expressions are a typed subset of CEL in which no failure is ever lost."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sds.kernel.contract.compiler import Program
from sds.kernel.contract.expressions import (
    BOOL,
    DEPTH_MAX,
    EXPRESSION_CHARS_MAX,
    INT,
    INT_MAX,
    STRING,
    Kind,
    check_expression,
    variable,
)
from sds.kernel.envelope.state import Value
from sds.kernel.errors import ContractError
from tests.scale import scale, seeded

TYPES = {
    "a.b": BOOL,
    "a.n": INT,
    "a.m": INT,
    "a.s": STRING,
    "a.e": Kind("string", frozenset({"rain", "snow"})),
    "in.if": BOOL,
    "a_b.c": INT,
    "a.b_c": INT,
}
FIELDS: dict[str, Value] = {
    "a.b": True,
    "a.n": 7,
    "a.m": 0,
    "a.s": "x",
    "a.e": "rain",
    "in.if": False,
    "a_b.c": 1,
    "a.b_c": 2,
}
FAILED = "failed"


def value_of(text: str, fields: dict[str, Value] | None = None) -> object:
    program = Program((check_expression(text, TYPES),))
    try:
        return program.evaluate(fields or FIELDS)[0]
    except Exception:  # noqa: BLE001  whatever fails has failed
        return FAILED


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("a.b", True),
        ("in.if", False),
        ("a_b.c * 10 + a.b_c", 12),
        ("1 + 2 * 3 - 4", 3),
        ("(1 + 2) * 3", 9),
        ("10 - 3 - 2", 5),
        ("100 / 7 / 2", 7),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("7 - -7", 14),
        ("--7", 7),
        ("007", 7),
        (str(INT_MAX), INT_MAX),
        ("!!a.b", True),
        ("!a.b || a.b", True),
        ("a.b || a.b && !a.b", True),
        ("(a.b || a.b) && !a.b", False),
        ("a.n > 3 && a.n <= 7", True),
        ("1 == 1 && 'x' != 'x'", False),
        ("a.s in ['x', 'y']", True),
        ("a.n in [1, 2, 3]", False),
        ('a.e == "rain"', True),
        ("a.e == 'snow' ? 1 : a.n == 7 ? 2 : 3", 2),
        ("a.b ? a.b ? 1 : 2 : 3", 1),
        ("min(a.n, max(2, 3))", 3),
        ("max(-1, a.m)", 0),
        ("a.s == 'é'", False),
        ("\n  a.n\n  + 1 ", 8),
    ],
)
def test_an_expression_means_what_it_says(text: str, value: object):
    assert (value, type(value)) == (value_of(text), type(value_of(text)))


@pytest.mark.parametrize(
    "text",
    [
        "1 / a.m",
        "1 % a.m",
        "1 / a.m > 0 || true",
        "!(1 / a.m > 0 && false)",
        "(1 / a.m > 0 || a.b) ? 1 : 2",
        "min(1 / a.m, 1)",
        "1 in [1, 1 / a.m]",
        "9223372036854775807 + a.n",
        "-9223372036854775807 - a.n",
        "9223372036854775807 * a.n > 0 || true",
        "-(-9223372036854775807 - 1)",
        "(-9223372036854775807 - 1) / -1",
    ],
)
def test_a_failure_is_never_swallowed(text: str):
    assert FAILED == value_of(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.m != 0 && 1 / a.m > 0", False),
        ("a.m == 0 || 1 / a.m > 0", True),
        ("a.m == 0 ? 5 : 1 / a.m", 5),
        ("a.m != 0 && a.b && 1 / a.m > 0 && a.b", False),
    ],
)
def test_a_side_that_need_not_be_read_cannot_fail(text: str, value: object):
    assert value == value_of(text)


def test_if_one_expression_of_a_program_fails_all_have_failed():
    program = Program((check_expression("1", TYPES), check_expression("1 / a.m", TYPES)))
    with pytest.raises(ZeroDivisionError):
        program.evaluate(FIELDS)


def test_a_field_that_is_not_there_is_a_failure():
    assert FAILED == value_of("a.n > 1 || true", {"a.m": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: the expression ends too early in ``"),
        ("a.n +", "column 6: the expression ends too early in `a.n +`"),
        ("(a.n", "column 5: expected `)` in `(a.n`"),
        ("a.n)", "column 4: unexpected `)` in `a.n)`"),
        ("a.n a.m", "column 5: unexpected `a.m` in `a.n a.m`"),
        ("a.x > 1", "column 1: `a.x` is not a declared snapshot field in `a.x > 1`"),
        ("a.n > x", "column 7: `x` is not a declared snapshot field in `a.n > x`"),
        ("min", "column 1: `min` is not a declared snapshot field in `min`"),
        ("has(a.n)", "column 1: `has` is not a function: only min and max are in `has(a.n)`"),
        ("a.s.size()", "column 1: `a.s.size` is not a function: only min and max are in `a.s.size()`"),
        (
            "a.n > 1.5",
            "column 7: `1.5` is not a score, which is between 0.0 and 1.0, with at most 6 decimals; amounts are whole numbers in minor units in `a.n > 1.5`",
        ),
        ("a.n > 0.5", "column 7: expected int, found score in `a.n > 0.5`"),
        ("a.n > 1e3", "column 7: cannot read `1e3` in `a.n > 1e3`"),
        ("a.n > 0x1F", "column 7: cannot read `0x1F` in `a.n > 0x1F`"),
        ("a.n > 5u", "column 7: cannot read `5u` in `a.n > 5u`"),
        ("a.n & 1", "column 5: cannot read `& 1` in `a.n & 1`"),
        ("a.s == 'x", "column 8: cannot read `'x` in `a.s == 'x`"),
        ("a.s == 'a\nb'", "column 8: cannot read `'a b'` in `a.s == 'a b'`"),
        ("a.s == 'a\\'b'", "column 8: cannot read `'a\\'b'` in `a.s == 'a\\'b'`"),
        ("a.n > 1 // x", "column 10: unexpected `/` in `a.n > 1 // x`"),
        ("a.n\u00a0> 1", "column 4: cannot read `\u00a0> 1` in `a.n\u00a0> 1`"),
        ("a.n > 99999999999999999999", "column 7: `99999999999999999999` is too large in `a.n > 99999999999999999999`"),
        ("a.n == 'x'", "column 8: expected int, found string in `a.n == 'x'`"),
        ("a.b + 1", "column 1: expected int, found bool in `a.b + 1`"),
        ("1 + a.b", "column 5: expected int, found bool in `1 + a.b`"),
        ("a.n && a.b", "column 1: expected bool, found int in `a.n && a.b`"),
        ("a.b || 1", "column 8: expected bool, found int in `a.b || 1`"),
        ("a.s < 'y'", "column 1: expected int, found string in `a.s < 'y'`"),
        ("a.b < a.b", "column 1: expected int, found bool in `a.b < a.b`"),
        ("!a.n", "column 2: expected bool, found int in `!a.n`"),
        ("-a.b", "column 2: expected int, found bool in `-a.b`"),
        ("a.n ? 1 : 2", "column 1: expected bool, found int in `a.n ? 1 : 2`"),
        ("a.b ? 1 : 'x'", "column 11: expected int, found string in `a.b ? 1 : 'x'`"),
        ("a.n < 1 < 2", "column 9: unexpected `<` in `a.n < 1 < 2`"),
        ("a.n in []", "column 9: unexpected `]` in `a.n in []`"),
        ("a.n in [1, 'x']", "column 12: expected int, found string in `a.n in [1, 'x']`"),
        ("a.e == 'snw'", "column 8: `snw` is not one of rain, snow in `a.e == 'snw'`"),
        ("'snw' == a.e", "column 10: `snw` is not one of rain, snow in `'snw' == a.e`"),
        ("a.e in ['rain', 'hail']", "column 17: `hail` is not one of rain, snow in `a.e in ['rain', 'hail']`"),
        (
            "a.e != (a.b ? 'rain' : 'snw')",
            "column 9: `snw` is not one of rain, snow in `a.e != (a.b ? 'rain' : 'snw')`",
        ),
        ("min(a.n)", "column 8: expected `,` in `min(a.n)`"),
        ("min(a.n, a.b)", "column 10: expected int, found bool in `min(a.n, a.b)`"),
    ],
)
def test_a_mistake_is_found_at_load_with_its_column(text: str, message: str):
    with pytest.raises(ContractError) as caught:
        check_expression(text, TYPES)
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * (DEPTH_MAX + 1) + "1" + ")" * (DEPTH_MAX + 1), f"nested deeper than {DEPTH_MAX}"),
        ("!" * (EXPRESSION_CHARS_MAX - 3) + "a.b", f"nested deeper than {DEPTH_MAX}"),
        ("-" * (EXPRESSION_CHARS_MAX - 1) + "1", f"nested deeper than {DEPTH_MAX}"),
        ("a.b ? 1 : " * 99 + "1", f"nested deeper than {DEPTH_MAX}"),
        ("[" * EXPRESSION_CHARS_MAX, "unexpected `[`"),
        ("1" + "+1" * EXPRESSION_CHARS_MAX, f"longer than {EXPRESSION_CHARS_MAX} characters"),
    ],
)
def test_an_expression_has_limits(text: str, message: str):
    with pytest.raises(ContractError) as caught:
        check_expression(text, TYPES)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1" + "+1" * 499, 500),
        ("||".join(["in.if"] * 142), False),
        ("&&".join(["a.b"] * 199), True),
        ("!" * (DEPTH_MAX - 1) + "a.b", False),
        ("(" * (DEPTH_MAX - 1) + "a.n" + ")" * (DEPTH_MAX - 1), 7),
        ("a.m > 0 ? 1 : " * (DEPTH_MAX - 1) + "2", 2),
        ("min(" * (DEPTH_MAX - 1) + "1" + ", a.n)" * (DEPTH_MAX - 1), 1),
    ],
)
def test_an_expression_within_the_limits_is_evaluated(text: str, value: object):
    assert value == value_of(text)


def test_a_ternary_of_any_string_is_any_string():
    assert value_of("(a.b ? a.e : a.s) == 'else'") is False


PATHS = st.from_regex(r"[a-z][a-z0-9_]{0,5}\.[a-z][a-z0-9_]{0,5}", fullmatch=True)


@given(PATHS, PATHS)
@example("a_d_b.c", "a.b_d_c")
def test_no_two_paths_share_avariable(one: str, other: str):
    assert (one == other) == (variable(one) == variable(other))


def test_random_expressions_have_the_value_that_a_plain_reading_gives_them():
    rng, failures = seeded(7), 0
    for _ in range(scale(1_200, 100_000)):
        wanted = rng.choice(("bool", "int"))
        text, expected = _random(rng, wanted, 4)
        assert (expected, type(expected)) == (found := value_of(text), type(found)), text
        failures += expected == FAILED
    assert failures > 0


def _random(rng: Random, kind: str, depth: int) -> tuple[str, object]:
    """Write a random well-typed expression and work out its value by plain reading: Python stands in for CEL."""
    make = {"bool": _random_bool, "int": _random_int, "string": _random_string}[kind]
    if depth and not rng.randrange(6):
        (c, cv), (y, yv), (n, nv) = (
            _random(rng, "bool", depth - 1),
            _random(rng, kind, depth - 1),
            _random(rng, kind, depth - 1),
        )
        return f"({c} ? {y} : {n})", FAILED if cv is FAILED else yv if cv else nv
    return make(rng, depth)


def _random_string(rng: Random, depth: int) -> tuple[str, object]:
    return rng.choice((("a.s", "x"), ("a.e", "rain")))  # literals are for the tables above


def _random_int(rng: Random, depth: int) -> tuple[str, object]:
    if not depth or not rng.randrange(4):
        return rng.choice((("a.n", 7), ("a.m", 0), ("3", 3), ("-2", -2), ("a_b.c", 1), (str(INT_MAX), INT_MAX)))
    (left, lv), (right, rv) = _random(rng, "int", depth - 1), _random(rng, "int", depth - 1)
    if not rng.randrange(4):
        name, pick = rng.choice((("min", min), ("max", max)))
        return f"{name}({left}, {right})", FAILED if FAILED in (lv, rv) else pick(lv, rv)  # type: ignore[call-overload]
    if not rng.randrange(6):
        return f"-({left})", _arithmetic("-", 0, lv)
    operator = rng.choice("+-*/%")
    return f"({left} {operator} {right})", _arithmetic(operator, lv, rv)


def _arithmetic(operator: str, left: object, right: object) -> object:
    if not isinstance(left, int) or not isinstance(right, int) or (operator in "/%" and right == 0):
        return FAILED
    if operator in "/%":  # towards zero, the remainder with the sign of the dividend
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        value = quotient if operator == "/" else left - right * quotient
        return value if quotient <= INT_MAX else FAILED
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return value if -INT_MAX - 1 <= value <= INT_MAX else FAILED


def _random_bool(rng: Random, depth: int) -> tuple[str, object]:
    if not depth or not rng.randrange(5):
        return rng.choice((("a.b", True), ("in.if", False), ("true", True), ("false", False)))
    choice = rng.randrange(4)
    if choice == 0:
        text, value = _random(rng, "bool", depth - 1)
        return f"!({text})", FAILED if value is FAILED else not value
    if choice == 1:
        return _random_logical(rng, depth)
    kind = rng.choice(("int", "int", "bool", "string"))
    (left, lv), (right, rv) = _random(rng, kind, depth - 1), _random(rng, kind, depth - 1)
    if choice == 2:
        value = FAILED if FAILED in (lv, rv) else lv == rv
        return f"({left} in [{right}, {right}])", value
    operator = rng.choice(("==", "!=", "<", "<=", ">", ">=") if kind == "int" else ("==", "!="))
    return f"({left} {operator} {right})", _relation(operator, lv, rv)


def _relation(operator: str, left: object, right: object) -> object:
    if FAILED in (left, right):
        return FAILED
    if operator in ("==", "!="):
        return (left == right) == (operator == "==")
    assert isinstance(left, int)
    assert isinstance(right, int)
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[operator]


def _random_logical(rng: Random, depth: int) -> tuple[str, object]:
    """Sides are read from the left until it is decided; what is read and fails, fails the whole."""
    operator = rng.choice(("||", "&&"))
    sides = [_random(rng, "bool", depth - 1) for _ in range(rng.randrange(2, 5))]
    value: object = operator == "&&"
    for _, value in sides:  # the last side that is read decides
        if value is FAILED or value == (operator == "||"):
            break
    return "(" + f" {operator} ".join(f"({text})" for text, _ in sides) + ")", value

"""Contract expressions: a typed subset of CEL, checked when a contract is loaded, evaluated by a CEL library.

CEL alone does not fail closed: `missing > 1 || true` is true, and so is `'a' < 1 || true`. Two things close it.
Here every expression is parsed and typed against the declared snapshot, so a wrong type or an undeclared name is
an error with a column at load; and `snapshot.check` demands every declared field with its type before evaluation.

The subset: literals (integers, strings, `true`, `false`), declared paths, `||  &&  !  ==  !=  <  <=  >  >=  in
+  -  *  /  %`, `c ? a : b`, lists after `in`, and `min(a, b)`, `max(a, b)`. No floats, no macros, no `has()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import cel

from sds.kernel.errors import ContractError
from sds.kernel.state import Fields

EXPRESSION_CHARS_MAX = 1000
DEPTH_MAX = 32

Check = Callable[[], "Kind"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The static type of an expression: `bool`, `int` or `string`; an enumeration is a string of known values."""

    name: str
    values: frozenset[str] = frozenset()


BOOL, INT, STRING = Kind("bool"), Kind("int"), Kind("string")

_TOKEN = re.compile(
    r"\s*(?:(?P<int>[0-9]+(?![.\w]))|(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<string>\"[^\"\\]*\"|'[^'\\]*')|(?P<op>\|\||&&|[=!<>]=|[-+*/%<>!?:(),\[\]]))"
)
_RELATIONS = ("==", "!=", "<", "<=", ">", ">=", "in")


def check_expression(text: str, types: Mapping[str, Kind]) -> tuple[Kind, frozenset[str]]:
    """Return the type of an expression and the paths it reads. Raises ContractError naming the column."""
    if len(text) > EXPRESSION_CHARS_MAX:
        raise ContractError(f"expression is longer than {EXPRESSION_CHARS_MAX} characters")
    parser = _Parser(text, types)
    kind = parser.ternary()
    if parser.peek():
        parser.fail(f"unexpected `{parser.peek()}`")
    return kind, frozenset(parser.paths)


class _Parser:
    """Recursive descent over the subset; every rule returns the type of what it read."""

    def __init__(self, text: str, types: Mapping[str, Kind]) -> None:
        self.text, self.types = text, types
        self.paths: set[str] = set()
        self.tokens = self._scan()
        self.at = 0
        self.depth = 0

    def _scan(self) -> list[tuple[str, str, int]]:
        found: list[tuple[str, str, int]] = []
        at = 0
        while at < len(self.text.rstrip()):
            token = _TOKEN.match(self.text, at)
            if token is None:
                raise ContractError(f"column {at + 1}: cannot read `{self.text[at:].strip()[:12]}` in `{self.text}`")
            group = str(token.lastgroup)
            found.append((group, token[group], token.start(group) + 1))
            at = token.end()
        return found

    def fail(self, message: str) -> None:
        column = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text) + 1
        raise ContractError(f"column {column}: {message} in `{self.text}`")

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][0] != "string" and self.peek() in expected:
            self.at += 1
            return True
        return False

    def demand(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"expected `{token}`")

    def want(self, kind: Kind, name: str) -> None:
        if kind.name != name:
            self.fail(f"expected {name}, found {kind.name}")

    def ternary(self) -> Kind:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            self.fail(f"nested deeper than {DEPTH_MAX}")
        condition = self.logical("||")
        if self.take("?"):
            self.want(condition, "bool")
            yes = self.ternary()
            self.demand(":")
            no = self.ternary()
            self.want(no, yes.name)
            condition = Kind(yes.name, yes.values | no.values)
        self.depth -= 1
        return condition

    def logical(self, operator: str) -> Kind:
        def below() -> Kind:
            return self.logical("&&") if operator == "||" else self.relation()

        left = below()
        while self.take(operator):
            self.want(left, "bool")
            self.want(below(), "bool")
        return left

    def relation(self) -> Kind:
        left = self.sum()
        operator = self.peek()
        if not self.take(*_RELATIONS):
            return left
        if operator == "in":
            self.demand("[")
            while True:
                self.comparable(left, self.sum())
                if not self.take(","):
                    break
            self.demand("]")
            return BOOL
        right = self.sum()
        self.comparable(left, right)
        if operator not in ("==", "!="):
            self.want(left, "int")
        return BOOL

    def comparable(self, left: Kind, right: Kind) -> None:
        self.want(right, left.name)
        for enum, other in ((left, right), (right, left)):
            if enum.values and other.values and not other.values <= enum.values and len(other.values) == 1:
                self.fail(f"`{next(iter(other.values))}` is not one of {', '.join(sorted(enum.values))}")

    def sum(self) -> Kind:
        return self.arithmetic(("+", "-"), lambda: self.arithmetic(("*", "/", "%"), self.unary))

    def arithmetic(self, operators: tuple[str, ...], below: Check) -> Kind:
        left = below()
        while self.take(*operators):
            self.want(left, "int")
            self.want(below(), "int")
        return left

    def unary(self) -> Kind:
        if self.take("!"):
            self.want(self.unary(), "bool")
            return BOOL
        if self.take("-"):
            self.want(self.unary(), "int")
            return INT
        return self.primary()

    def primary(self) -> Kind:
        if self.take("("):
            inner = self.ternary()
            self.demand(")")
            return inner
        if self.at >= len(self.tokens):
            self.fail("the expression ends too early")
        group, text, _ = self.tokens[self.at]
        if group == "int":
            self.at += 1
            return INT
        if group == "string":
            self.at += 1
            return Kind("string", frozenset({text[1:-1]}))
        if group == "path":
            return self.name(text)
        self.fail(f"unexpected `{text}`")
        raise AssertionError

    def name(self, text: str) -> Kind:
        self.at += 1
        if text in ("true", "false"):
            return BOOL
        if text in ("min", "max") and self.take("("):
            self.want(self.ternary(), "int")
            self.demand(",")
            self.want(self.ternary(), "int")
            self.demand(")")
            return INT
        if text not in self.types:
            self.at -= 1
            self.fail(f"`{text}` is not a declared snapshot field")
        self.paths.add(text)
        return self.types[text]


class Program:
    """All expressions of a contract as one CEL list: evaluated together, and if one fails, all have failed."""

    def __init__(self, expressions: tuple[str, ...]) -> None:
        self._functions = {"min": min, "max": max}
        self._program = cel.compile("[" + ", ".join(f"({e})" for e in expressions) + "]")

    def evaluate(self, fields: Fields) -> list[object]:
        """Return one value for each expression. Raises whatever CEL raises; the caller fails closed."""
        roots: dict[str, dict[str, object]] = {}
        for path, value in fields.items():
            root, _, leaf = path.partition(".")
            roots.setdefault(root, {})[leaf] = value
        values: list[object] = self._program.execute(cel.Context(roots, self._functions))
        return values

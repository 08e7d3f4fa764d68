"""Contract expressions: a typed subset of CEL, checked when a contract is loaded. `compiler.Program` evaluates them.

CEL alone does not fail closed: `missing > 1 || true` is true, so is `'a' < 1 || true`, and so is `1 / 0 > 1 || true`. Three
things close it. Every expression is parsed and typed against the declared snapshot, so that a wrong type or an undeclared
name is an error with a column at load. `compiler.faults` demands every declared field with its type before evaluation. And
the CEL library evaluates not the author's text but the parsed tree written out again, with `a || b` as `a ? true : b` and
`a && b` as `a ? b : false`: when a side that is evaluated fails, the whole fails; a side that does not matter is not
evaluated; and precedence is this parser's alone.

The subset: literals (integers, strings, `true`, `false`), declared paths, `||  &&  !  ==  !=  <  <=  >  >=  in
+  -  *  /  %`, `c ? a : b`, lists after `in`, and `min(a, b)`, `max(a, b)`. No floats, no macros, no `has()`. A score, which
only a reading has, compares with decimals: both are whole numbers of millionths.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, NoReturn

from sds.kernel.errors import ContractError

EXPRESSION_CHARS_MAX = 1000
DEPTH_MAX = 32
INT_MAX = 2**63 - 1


def _compiled_module() -> Any:
    """Import `cel.cel` alone: its package also imports a command line, which every start of `sds` would wait for.

    Code that imports the package later in this process gets what it exports, but no attribute `cel.cel`.
    """
    package = find_spec("cel")  # imports nothing
    folders = package.submodule_search_locations if package else None
    spec = PathFinder.find_spec("cel.cel", folders) if folders else None
    if spec is None or spec.loader is None:
        raise ImportError("`common-expression-language` is not installed, or has no compiled module for this Python")
    if spec.name not in sys.modules:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[spec.name] = module
    return sys.modules[spec.name]


cel = _compiled_module()


@dataclass(frozen=True, slots=True)
class Kind:
    """The static type of an expression: `bool`, `int`, `string` or `score`. An enumeration is a string with `values`."""

    name: str
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tree:
    """An expression as parsed, for statements about it that need no evaluation (`sds.lint.intervals`).

    `op`: `literal`, `path`, `chain` (arithmetic from the left, its operators in `value`), `neg`, `?`, `in`, `min`, `max`,
    `!`, `||`, `&&` or a relation.
    """

    op: str
    parts: tuple[Tree, ...] = ()
    value: bool | int | str = ""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of an expression: its type, the CEL text that evaluates it, the token it begins at, and its tree."""

    kind: Kind
    cel: str
    at: int
    tree: Tree


@dataclass(frozen=True, slots=True)
class Checked:
    """A whole expression: its type, the CEL text that evaluates it, the paths that it reads, and its tree."""

    kind: Kind
    cel: str
    reads: frozenset[str]
    tree: Tree


BOOL, INT, STRING, SCORE = Kind("bool"), Kind("int"), Kind("string"), Kind("score")
SCORE_DECIMALS = 6
READING = "reading."

_TOKEN = re.compile(
    r"\s*(?:(?P<decimal>[0-9]+\.[0-9]+(?![.\w]))|(?P<int>[0-9]+(?![.\w]))|(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<string>\"[^\"\\\x00-\x1f]*\"|'[^'\\\x00-\x1f]*')|(?P<op>\|\||&&|[=!<>]=|[-+*/%<>!?:(),\[\]]))",
    re.ASCII,
)
_BLANK = " \t\n\r\f\v"
_RELATIONS = ("==", "!=", "<", "<=", ">", ">=", "in")


def check_expression(text: str, types: Mapping[str, Kind]) -> Checked:
    """Type-check an expression over the declared `types`. Raises ContractError, which names the column."""
    if len(text) > EXPRESSION_CHARS_MAX:
        raise ContractError(f"longer than {EXPRESSION_CHARS_MAX} characters")
    parser = _Parser(text, types)
    whole = parser.ternary()
    if parser.peek():
        parser.fail(f"unexpected `{parser.peek()}`")
    try:
        cel.compile(f"[{whole.cel}]")
    except ValueError as error:
        raise ContractError(f"too deeply nested in `{parser.line}`") from error
    return Checked(whole.kind, whole.cel, frozenset(parser.paths), whole.tree)


def typed_expression(path: tuple[str | int, ...], text: str, types: Mapping[str, Kind], want: str) -> Checked:
    """Type-check a contract's expression that must be of type `want`. Raises ContractError with a `path` attribute."""
    try:
        found = check_expression(text, types)
        if found.kind.name != want:
            raise ContractError(f"expected {want}, found {found.kind.name} in `{text}`")
    except ContractError as error:
        error.path = path  # type: ignore[attr-defined]  # the loader turns it into a line number
        raise
    return found


class _Parser:
    """A recursive descent parser for the subset. Every rule returns the term that it has read."""

    def __init__(self, text: str, types: Mapping[str, Kind]) -> None:
        self.text, self.types = text, types
        self.line = re.sub(r"\s", " ", text, flags=re.ASCII)  # for messages, which are one line
        self.paths: set[str] = set()
        self.tokens = self._scan()
        self.at = 0
        self.depth = 0

    def _scan(self) -> list[tuple[str, str, int]]:
        found: list[tuple[str, str, int]] = []
        at = 0
        while at < len(self.text.rstrip(_BLANK)):
            token = _TOKEN.match(self.text, at)
            if token is None:
                start = len(self.text) - len(self.text[at:].lstrip(_BLANK))
                raise ContractError(f"column {start + 1}: cannot read `{self.line[start:][:12]}` in `{self.line}`")
            group = str(token.lastgroup)
            found.append((group, token[group], token.start(group) + 1))
            at = token.end()
        return found

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        column = self.tokens[at][2] if at < len(self.tokens) else len(self.text) + 1
        raise ContractError(f"column {column}: {message} in `{self.line}`")

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> bool:
        if self.peek() in expected and self.tokens[self.at][0] != "string":
            self.at += 1
            return True
        return False

    def demand(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"expected `{token}`")

    def want(self, term: Term, name: str) -> str:
        if term.kind.name != name:
            self.fail(f"expected {name}, found {term.kind.name}", term.at)
        return term.cel

    def deeper(self, rule: Callable[[], Term]) -> Term:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            self.fail(f"nested deeper than {DEPTH_MAX}")
        found = rule()
        self.depth -= 1
        return found

    def ternary(self) -> Term:
        return self.deeper(self._ternary)

    def _ternary(self) -> Term:
        first = self.disjunction()
        if not self.take("?"):
            return first
        condition, yes = self.want(first, "bool"), self.ternary()
        self.demand(":")
        no = self.ternary()
        self.want(no, yes.kind.name)
        # A side that may be any string makes the whole any string.
        values = yes.kind.values | no.kind.values if yes.kind.values and no.kind.values else frozenset()
        tree = Tree("?", (first.tree, yes.tree, no.tree))
        return Term(Kind(yes.kind.name, values), f"({condition} ? {yes.cel} : {no.cel})", first.at, tree)

    def disjunction(self) -> Term:
        return self.logical("||", self.conjunction)

    def conjunction(self) -> Term:
        return self.logical("&&", self.relation)

    def logical(self, operator: str, below: Callable[[], Term]) -> Term:
        first = below()
        if self.peek() != operator:
            return first
        sides, trees = [self.want(first, "bool")], [first.tree]
        while self.take(operator):
            side = below()
            sides.append(self.want(side, "bool"))
            trees.append(side.tree)
        return Term(BOOL, _as_conditions(operator, sides), first.at, Tree(operator, tuple(trees)))

    def relation(self) -> Term:
        left = self.sum()
        operator = self.peek()
        if not self.take(*_RELATIONS):
            return left
        if operator == "in":
            members = self.members(left)
            tree = Tree("in", (left.tree, *(member.tree for member in members)))
            return Term(BOOL, f"({left.cel} in [{', '.join(member.cel for member in members)}])", left.at, tree)
        right = self.sum()
        self.comparable(left, right)
        if operator not in ("==", "!=") and left.kind != SCORE:
            self.want(left, "int")
        tree = Tree(operator, (left.tree, right.tree))
        return Term(BOOL, f"({left.cel} {operator} {right.cel})", left.at, tree)

    def members(self, left: Term) -> list[Term]:
        self.demand("[")
        found: list[Term] = []
        while not found or self.take(","):
            item = self.sum()
            self.comparable(left, item)
            found.append(item)
        self.demand("]")
        return found

    def comparable(self, left: Term, right: Term) -> None:
        self.want(right, left.kind.name)
        some, other = left.kind.values, right.kind.values
        if some and other and not (some <= other or other <= some):
            known, strange = (some, other - some) if len(some) >= len(other) else (other, some - other)
            self.fail(f"`{min(strange)}` is not one of {', '.join(sorted(known))}", right.at)

    def sum(self) -> Term:
        return self.arithmetic(("+", "-"), self.product)

    def product(self) -> Term:
        return self.arithmetic(("*", "/", "%"), self.unary)

    def arithmetic(self, operators: tuple[str, ...], below: Callable[[], Term]) -> Term:
        first = below()
        if self.peek() not in operators:
            return first
        text, read, trees = self.want(first, "int"), "", [first.tree]
        while (operator := self.peek()) and self.take(*operators):
            part = below()
            text += f" {operator} {self.want(part, 'int')}"
            read += operator
            trees.append(part.tree)
        return Term(INT, f"({text})", first.at, Tree("chain", tuple(trees), read))

    def unary(self) -> Term:
        at = self.at
        if self.take("!"):
            part = self.deeper(self.unary)
            return Term(BOOL, f"!{self.want(part, 'bool')}", at, Tree("!", (part.tree,)))
        if self.take("-"):
            part = self.deeper(self.unary)
            text, tree = self.want(part, "int"), Tree("neg", (part.tree,))
            # CEL's negation of the least integer wraps around, while a subtraction fails.
            return Term(INT, f"-{text}" if text.isdigit() else f"(0 - {text})", at, tree)
        return self.primary()

    def primary(self) -> Term:
        at = self.at
        if self.take("("):
            inner = self.ternary()
            self.demand(")")
            return inner
        if at >= len(self.tokens):
            self.fail("the expression ends too early")
        group, text, _ = self.tokens[at]
        if group == "op":
            self.fail(f"unexpected `{text}`")
        self.at += 1
        if group == "string":
            return Term(Kind("string", frozenset({text[1:-1]})), text, at, Tree("literal", value=text[1:-1]))
        if group == "path":
            return self.name(text, at)
        if group == "decimal":
            return self.score(text, at)
        if int(text) > INT_MAX:
            self.fail(f"`{text[:24]}` is too large", at)
        return Term(INT, str(int(text)), at, Tree("literal", value=int(text)))

    def score(self, text: str, at: int) -> Term:
        whole, decimals = text.split(".")
        if int(whole[:2]) > 1 or len(whole) > 1 or len(decimals) > SCORE_DECIMALS or (whole == "1" and int(decimals)):
            limits = f"between 0.0 and 1.0, with at most {SCORE_DECIMALS} decimals"
            self.fail(f"`{text[:24]}` is not a score, which is {limits}; amounts are whole numbers in minor units", at)
        value = int(whole + decimals.ljust(SCORE_DECIMALS, "0"))
        return Term(SCORE, str(value), at, Tree("literal", value=value))

    def name(self, text: str, at: int) -> Term:
        if text in ("true", "false"):
            return Term(BOOL, text, at, Tree("literal", value=text == "true"))
        if text in ("min", "max") and self.take("("):
            left = self.ternary()
            self.want(left, "int")
            self.demand(",")
            right = self.ternary()
            self.want(right, "int")
            self.demand(")")
            return Term(INT, f"{text}({left.cel}, {right.cel})", at, Tree(text, (left.tree, right.tree)))
        if text not in self.types:
            self.fail(f"`{text}` {self._unknown(text)}", at)
        self.paths.add(text)
        return Term(self.types[text], variable(text), at, Tree("path", value=text))

    def _unknown(self, text: str) -> str:
        if self.peek() == "(":
            return "is not a function: only min and max are"
        if not text.startswith(READING):
            return "is not a declared snapshot field"
        if any(path.startswith(READING) for path in self.types):
            return "is not one of the readings"
        return "is a reading: only `policy` may use readings"


def variable(path: str) -> str:
    """Name the CEL variable that holds a path. It is flat: to build a map inside CEL costs ten times as much.

    No two paths give the same name, and no name is a reserved word of CEL.
    """
    return path.replace("_", "__").replace(".", "_d_")


def _as_conditions(operator: str, sides: list[str]) -> str:
    """Write `||` and `&&` as conditions, evaluated from the left until the result is known, so that no failure is lost.

    Balanced, because a CEL library limits how deep an expression may be nested.
    """
    if len(sides) == 1:
        return sides[0]
    half = len(sides) // 2
    left, right = _as_conditions(operator, sides[:half]), _as_conditions(operator, sides[half:])
    return f"({left} ? true : {right})" if operator == "||" else f"({left} ? {right} : false)"

"""Finds what a contract's rules do that its author may not have meant, by proof and by trying snapshots.

Pure: a contract and randomness in, findings out. A proof (`intervals`) is called one. Every other finding was found on
a snapshot, which is shown, or says in how many snapshots something was not found. `declared` checks the declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from sds.kernel.contract.compiler import Path, Program
from sds.kernel.contract.expressions import Tree
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import KindSpec
from sds.kernel.envelope.envelope import MAGNITUDE_MAX, Bound, bound
from sds.kernel.envelope.state import Fields
from sds.lint.declared import declared_findings
from sds.lint.diff import human_permits_more
from sds.lint.finding import Finding, Severity, in_words
from sds.lint.intervals import Constraint, Ints, assume, of, propagate
from sds.lint.policy import policy_findings
from sds.lint.snapshots import (
    PLAUSIBLE_MAX,
    Space,
    calm_envelope,
    draw,
    shrink,
    solved,
    space_of,
    subtrees,
    what_matters,
)

RANDOM_SNAPSHOTS = 600
SOLVES = 6
WIDE = tuple(10**digits for digits in (7, 9, 12, 14))
_Key = tuple[str, Path]


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one check, in no order. `snapshots`: how many were tried; `reached`: by kind, those that permit it."""

    findings: tuple[Finding, ...]
    snapshots: int
    reached: dict[str, list[Fields]]


@dataclass
class _Seen:
    """The result on one snapshot: issues by (rule, place) with their words, and the permitted kinds."""

    issues: dict[_Key, str] = field(default_factory=dict)
    permitted: set[str] = field(default_factory=set)


def lint(contract: Contract, rng: Random, *, random_snapshots: int = RANDOM_SNAPSHOTS) -> Report:
    """Check a contract that loads. Equal seeds give equal reports."""
    space = space_of(contract)
    look = _Look(space)
    findings = [*declared_findings(contract, look.places), *_proven(look), *_human(contract, rng)]
    findings += policy_findings(contract, space, rng)
    hopeless = {finding.path[1] for finding in findings if finding.rule == "kind-unreachable" and len(finding.path) > 1}
    reached: dict[str, list[Fields]] = {}
    in_force: set[str] = set()
    first: dict[_Key, Fields] = {}
    tried = 0
    for fields in _snapshots(look, rng, random_snapshots):
        tried += 1
        seen = look.at(fields)
        for key in seen.issues:
            first.setdefault(key, fields)
        for kind in seen.permitted:
            reached.setdefault(kind, []).append(fields)
        in_force.update(calm_envelope(space, fields).names if seen.permitted - in_force else ())
    findings += [look.finding(key, fields) for key, fields in first.items()]
    if not any(finding.rule == "when-never" for finding in findings):
        wanted = [kind for kind in look.kinds if kind not in hopeless]
        findings += [f for kind in wanted if (f := _unreached(kind, reached, in_force, tried)) is not None]
    return Report(tuple(findings), tried, reached)


def _human(contract: Contract, rng: Random) -> list[Finding]:
    if human_permits_more(contract, rng) is not False:
        return []
    message = "a human may decide nothing here that the agent may not (a search, not a proof)"
    return [
        Finding("human-no-wider", "warning", ("human",), message, "remove the section, or widen what a human may do")
    ]


def _unreached(kind: str, reached: dict[str, list[Fields]], in_force: set[str], tried: int) -> Finding | None:
    if kind not in reached:
        return Finding(
            "kind-unreachable",
            "warning",
            ("kinds", kind, "when"),
            f"`{kind}` was not permitted by any of {tried} snapshots (a search, not a proof)",
            "compare its `when`, the contract's `when` and its bounds",
        )
    if kind not in in_force:
        return Finding(
            "kind-never-in-force",
            "warning",
            ("kinds", kind),
            f"`{kind}` was permitted, but never in force in {tried} snapshots: the amount that it draws or spends was never available",
            "compare its smallest number with what it draws from and with the spend limits",
        )
    return None


class _Look:
    """Evaluates a contract's expressions on one snapshot and names the issues of the results."""

    def __init__(self, space: Space) -> None:
        self.space, self.contract = space, space.rules.contract
        self.kinds = sorted({*self.contract.authority, self.contract.refusal})
        self.places = {at: found for at, found in space.places.items() if len(at) == 1 or at[1] in self.kinds}
        self._whole = Program(tuple(self.places.values()))
        self._single = {at: Program((found,)) for at, found in self.places.items()}

    def at(self, fields: Fields) -> _Seen:
        seen = _Seen()
        try:
            values = dict(zip(self.places, self._whole.evaluate(fields), strict=True))
        except Exception:  # noqa: BLE001  any error of CEL is a finding
            seen.issues = {
                ("expression-fails", at): words for at in self.places if (words := self._failure(at, fields))
            }
            return seen
        for kind in self.kinds:
            spec = self.contract.kinds[kind]
            wanted = (kind == self.contract.refusal or values["when",] is True) and values[
                "kinds", kind, "when"
            ] is True
            self._kind(kind, spec, values, fields, seen, wanted=wanted)
        return seen

    def _failure(self, at: Path, fields: Fields) -> str:
        try:
            self._single[at].evaluate(fields)
        except ZeroDivisionError:
            return "divides by zero"
        except Exception:  # noqa: BLE001  all other failures are overflows
            return "overflows"
        return ""

    def _kind(
        self, kind: str, spec: KindSpec, values: dict[Path, object], fields: Fields, seen: _Seen, *, wanted: bool
    ) -> None:
        numbers: dict[str, int] = {}
        for name in spec.fills:
            at = ("kinds", kind, "fills", name, "value")
            numbers[name] = self._limited(at, values, seen)
        for name in spec.params:
            lo, hi = (self._limited(("kinds", kind, "params", name, end), values, seen) for end in ("lo", "hi"))
            allowed = self._bound(kind, name, lo, hi, seen, wanted=wanted)
            wanted = wanted and allowed is not None
            numbers[name] = allowed.hi if allowed else 0
        if wanted:
            seen.permitted.add(kind)
            self._draws(kind, spec, numbers, fields, seen)

    def _limited(self, at: Path, values: dict[Path, object], seen: _Seen) -> int:
        value = values[at]
        number = value if isinstance(value, int) else 0
        if abs(number) > MAGNITUDE_MAX:
            seen.issues["beyond-limits", at] = f"is {number}, which is beyond {MAGNITUDE_MAX}"
        return max(-MAGNITUDE_MAX, min(MAGNITUDE_MAX, number))

    def _bound(self, kind: str, name: str, lo: int, hi: int, seen: _Seen, *, wanted: bool) -> Bound | None:
        spec = self.contract.kinds[kind].params[name]
        found = bound(lo, hi, step=spec.step, residue=spec.residue, scale=spec.scale)
        if found is None and wanted:
            at = ("kinds", kind, "params", name)
            if lo > hi:
                seen.issues["bound-empty", at] = f"lo is {lo} and hi is {hi}"
            else:
                seen.issues["step-skips-all", at] = f"no number from {lo} to {hi} is {spec.residue} modulo {spec.step}"
        return found

    def _draws(self, kind: str, spec: KindSpec, numbers: dict[str, int], fields: Fields, seen: _Seen) -> None:
        for path, drawn in spec.draws.items():
            most, there = numbers[drawn] if isinstance(drawn, str) else drawn, fields[path]
            if isinstance(there, int) and most > there:
                what = f"`{drawn}` up to {most}" if isinstance(drawn, str) else str(drawn)
                seen.issues["draw-beyond", ("kinds", kind, "draws", path)] = f"draws {what}, but there is only {there}"

    def finding(self, key: _Key, fields: Fields) -> Finding:
        """Return the finding of an issue, on the plainest snapshot that shows it."""
        rule, at = key

        def holds(trial: Fields) -> bool:
            return key in self.at(trial).issues

        plain = shrink(self.space, fields, holds)
        shown = what_matters(self.space, plain, holds)
        words, hint = _WORDS[rule]
        absurd = any(isinstance(value, int) and abs(value) > PLAUSIBLE_MAX for value in shown.values())
        severity: Severity = "info" if absurd else "warning"
        message = words.format(self._named(at), what=self.at(plain).issues[key], when=in_words(shown))
        return Finding(rule, severity, at, message, hint, shown)

    @staticmethod
    def _named(at: Path) -> str:
        return f"`{'.'.join(at[1:])}`" if len(at) > 1 else "`when`"


_WORDS = {
    "expression-fails": (
        "{} {what} when {when}: then only ESCALATE is left",
        "guard the expression: `d != 0 ? n / d : 0`, `min(..)`",
    ),
    "beyond-limits": ("{} {what} when {when}: then only ESCALATE is left", "limit it with `min(..)` or `max(..)`"),
    "bound-empty": (
        "{} has no value when {when}: {what}, and the kind is not permitted",
        "exclude this case in the kind's `when`",
    ),
    "step-skips-all": (
        "{} has no value when {when}: {what}, and the kind is not permitted",
        "widen the bounds, or use a smaller `step`",
    ),
    "draw-beyond": (
        "{} {what} when {when}: a safeguard narrows or drops the kind",
        "limit the amount by the field, or exclude this case in `when`",
    ),
}


def _proven(look: _Look) -> list[Finding]:
    """Return what intervals prove: expressions that always fail, and kinds that no snapshot permits."""
    whole = look.space.whole
    found = [finding for at in look.places if (finding := _always_fails(look, at)) is not None]
    if propagate([(look.places["when",].tree, True)], whole) is None:
        message = f"never holds (proven by intervals): only {look.contract.refusal} and ESCALATE are ever possible"
        found.append(
            Finding("when-never", "error", ("when",), f"`when` {message}", "one of its conditions excludes another")
        )
        return found
    for kind in look.kinds:
        at = _contradiction(look, kind)
        if at is not None:
            message = f"contradiction: no snapshot permits `{kind}` (proven by intervals)"
            hint = "its `when`, the contract's `when` and its bounds exclude each other"
            found.append(Finding("kind-unreachable", "error", at, message, hint))
    return found


def _contradiction(look: _Look, kind: str) -> Path | None:
    """Return the first place of a kind, in the order of evaluation, at which no snapshot is left."""
    whole, space = look.space.whole, look.space
    if propagate(space.permitting(kind, with_values=False), whole) is None:
        return ("kinds", kind, "when")
    if propagate(space.permitting(kind), whole) is None:
        params = sorted(look.contract.kinds[kind].params)
        return ("kinds", kind, "params", params[0]) if len(params) == 1 else ("kinds", kind, "params")
    return None


def _always_fails(look: _Look, at: Path) -> Finding | None:
    tree, whole = look.places[at].tree, look.space.whole
    if look.places[at].kind.name == "bool":
        fails = all(assume(tree, whole, wanted) is None for wanted in (True, False))
    else:
        value = of(tree, whole)
        fails = not isinstance(value, Ints) or value.lo > MAGNITUDE_MAX or value.hi < -MAGNITUDE_MAX
    if not fails:
        return None
    message = f"{look._named(at)} fails whatever the snapshot (proven by intervals): every decision escalates"  # noqa: SLF001
    return Finding(
        "expression-always-fails", "error", at, message, "it divides by zero or leaves the limits of amounts"
    )


def _snapshots(look: _Look, rng: Random, random_snapshots: int) -> Iterator[Fields]:
    """Yield snapshots of the declared types, those aimed at an issue first."""
    yield from solved(look.space, list(_aims(look)), rng, times=SOLVES)
    for _ in range(random_snapshots):
        yield draw(look.space, rng)


def _aims(look: _Look) -> Iterator[list[Constraint]]:
    for kind in look.kinds:
        spec, permitting = look.contract.kinds[kind], look.space.permitting(kind)
        yield permitting
        for param, numbers in spec.params.items():
            lo, hi = (look.space.bound(kind, param, end) for end in ("lo", "hi"))
            yield [*look.space.permitting(kind, with_values=False), (Tree("<=", (lo, hi)), False)]
            if numbers.step > 1:
                gap = Tree("chain", (hi, lo), "-")
                yield [*permitting, (Tree("<", (gap, Tree("literal", value=numbers.step))), True)]
                for wide in WIDE:  # the language of such a range may be too long for an engine
                    yield [*permitting, (Tree(">=", (gap, Tree("literal", value=wide))), True)]
        for path, drawn in spec.draws.items():
            yield [*permitting, (Tree(">", (_drawn(look.space, kind, drawn), Tree("path", value=path))), True)]
    for checked in look.places.values():
        for divisor in _divisors(checked.tree):
            yield [(Tree("==", (divisor, Tree("literal", value=0))), True)]


def _drawn(space: Space, kind: str, drawn: str | int) -> Tree:
    if isinstance(drawn, int):
        return Tree("literal", value=drawn)
    spec = space.rules.contract.kinds[kind]
    return (
        space.bound(kind, drawn, "hi") if drawn in spec.params else space.tree("kinds", kind, "fills", drawn, "value")
    )


def _divisors(tree: Tree) -> Iterator[Tree]:
    for each in subtrees(tree):
        if each.op == "chain":
            yield from (part for op, part in zip(str(each.value), each.parts[1:], strict=True) if op in "/%")

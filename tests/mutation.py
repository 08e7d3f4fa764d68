"""Mutants of the kernel, and whether its tests notice them: `python -m tests.mutation --sample 40 --seed 1`. Outside CI.

Cosmic Ray makes the mutants; besides, single statements are left out. Each is tried in a copy of the tree, by the tests
of its module first and then by the other quick ones of the kernel. What survives is listed in `docs/mutations.md`, with a
reason: one that is not listed there makes the exit code 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "docs" / "mutations.md"
# Tests of the whole kernel that take more than some seconds each: crashes, histories, fuzz.
SLOW = frozenset({
    "test_at_most_once", "test_crash", "test_damaged_record", "test_dim_fuzz", "test_histories", "test_human_crash",
    "test_registry_crash", "test_saga_crash",
})  # fmt: skip
CORE = frozenset({"test_kernel", "test_recovery", "test_audit_tables"})  # between them all of deciding and recording
MUTANT_S_MAX = 600
TEST_S_MAX = 60
SHOWN_CHARS_MAX = 160
OUTPUT_CHARS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file. `line`: its place; `how`: the operator; `source`, `code`: the file before and after."""

    file: str
    line: int
    how: str
    source: str
    code: str

    @property
    def change(self) -> str:
        """The change in one line, as `docs/mutations.md` names it: the same wherever the lines move to."""
        lines = list(unified_diff(self.source.splitlines(), self.code.splitlines(), lineterm="", n=0))[2:]
        was, now = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        return f"{self.file}: `{was[:SHOWN_CHARS_MAX]}` -> `{now[:SHOWN_CHARS_MAX]}`"


def mutants(file: str, source: str, rng: Random) -> Iterator[Mutant]:
    """Yield the mutants of a file, in random order, without those that run the same."""
    makers = [*_of_cosmic_ray(source), *without_statements(source)]
    rng.shuffle(makers)
    meant = meaning(source)
    for line, how, make in makers:
        code = make()
        if code is not None and meaning(code) not in (meant, None):
            yield Mutant(file, line, how, source, code)


@dataclass(frozen=True, slots=True)
class Make:
    """Makes one of Cosmic Ray's mutants when it is called: there are thousands."""

    source: str
    operator: object
    occurrence: int

    def __call__(self) -> str | None:
        from cosmic_ray.mutating import mutate_code

        made: str | None = mutate_code(self.source, self.operator, self.occurrence)
        return made


def _of_cosmic_ray(source: str) -> Iterator[tuple[int, str, Make]]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue
        places = [start for node in nodes for start, _ in kind().mutation_positions(node)]
        for occurrence, (line, _) in enumerate(places):
            yield line, name.partition("/")[2], Make(source, kind(), occurrence)


@dataclass(frozen=True, slots=True)
class Without:
    """Makes a mutant without one statement, the lines `first` to `last`."""

    source: str
    first: int
    last: int
    indent: int

    def __call__(self) -> str:
        lines = self.source.splitlines(keepends=True)
        return "".join([*lines[: self.first - 1], " " * self.indent + "pass\n", *lines[self.last :]])


def without_statements(source: str) -> Iterator[tuple[int, str, Without]]:
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Expr | ast.If | ast.Raise | ast.Return | ast.AugAssign | ast.For | ast.With):
                last = node.end_lineno or node.lineno
                yield node.lineno, "LeaveOut", Without(source, node.lineno, last, node.col_offset)


class _Bare(ast.NodeTransformer):
    """Removes what does not affect a run: annotations, docstrings, kinds of parameters, decorators with arguments."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list = [each for each in node.decorator_list if not isinstance(each, ast.Call)]
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        self.generic_visit(node)
        names = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        values = [*node.defaults, *filter(None, node.kw_defaults)]
        return ast.arguments([], names, node.vararg, [], [], node.kwarg, values)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def meaning(code: str) -> str | None:
    """Return what of a source affects a run, as text; None where it is no Python."""
    try:
        return ast.dump(_Bare().visit(ast.parse(code)))
    except SyntaxError:
        return None


def chosen_tests(file: str, root: Path, *, near: bool) -> list[str]:
    """Return the quick tests of the kernel: first those named after the module, then those that import it, then CORE, then,
    unless `near`, all others.
    """
    name, folder = Path(file).stem, root / "tests" / "kernel"
    quick = sorted(path for path in folder.rglob("test_*.py") if path.stem not in SLOW)
    own = [path for path in quick if path.stem.startswith(f"test_{name}")]
    imported = rf"from sds\.kernel(\.\w+)*(\.{name} import | import ([^\n(]*|\([^)]*)\b{name}\b)"
    naming = [path for path in quick if re.search(imported, path.read_text(encoding="utf-8"))]
    core = [path for path in quick if path.stem in CORE]
    chosen = dict.fromkeys([*own, *naming, *core, *([] if near else quick)])
    return [str(path.relative_to(root)) for path in chosen]


def survives(copy: Path, mutant: Mutant, *, near: bool) -> bool:
    """Tell whether a mutant passes the tests; one that hangs does not."""
    path = copy / mutant.file
    whole = path.read_bytes()
    path.write_text(mutant.code, encoding="utf-8")
    try:
        return run_on(copy, chosen_tests(mutant.file, copy, near=near), MUTANT_S_MAX).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_bytes(whole)


def run_on(copy: Path, tests: Iterable[str], within_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, up to the first that fails. Raises TimeoutExpired."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S_MAX}", *tests]
    return subprocess.run(run, cwd=copy, env=environment, capture_output=True, text=True, timeout=within_s, check=False)


def copied(into: Path) -> Path:
    """Copy the tracked files of the tree into a folder, links as links; return the folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return into


def drawn(files: list[str], sample: int, rng: Random) -> Iterator[Mutant]:
    """Yield up to `sample` different mutants, from files drawn in proportion to their length."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    made = {file: mutants(file, source, rng) for file, source in sources.items()}
    weights = [len(source) for source in sources.values()]
    for _ in range(sample):
        mutant = next(made[rng.choices(files, weights)[0]], None)
        if mutant is not None:
            yield mutant


def judged(copy: Path, mutants: Iterable[Mutant], *, near: bool) -> Iterator[tuple[str, Mutant]]:
    """Yield each mutant with its outcome: killed, listed in `docs/mutations.md`, or SURVIVED."""
    listed = KNOWN.read_text(encoding="utf-8")
    for mutant in mutants:
        if not survives(copy, mutant, near=near):
            yield "killed", mutant
        else:
            yield "listed" if mutant.change in listed else "SURVIVED", mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=40, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--near", action="store_true", help="only with the tests that import the module: a first look")
    parser.add_argument("files", nargs="*", help="kernel/decision/dim.py and so on; without any, all of kernel/")
    asked = parser.parse_args()
    files = asked.files or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernel").rglob("*.py"))
    if missing := [file for file in files if not (ROOT / file).is_file()]:
        parser.error(f"there is no file `{missing[0]}` in {ROOT}")
    began, counts, unlisted = time.monotonic(), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy = copied(Path(name))
        bare = run_on(copy, {test for file in files for test in chosen_tests(file, copy, near=asked.near)})
        if bare.returncode:
            sys.exit(f"{bare.stdout[-OUTPUT_CHARS_MAX:]}error: the tests fail without any mutant")
        for became, mutant in judged(copy, drawn(files, asked.sample, Random(asked.seed)), near=asked.near):
            counts[became] += 1
            unlisted += [mutant.change] if became == "SURVIVED" else []
            print(f"{became:8}  {mutant.how:32}  line {mutant.line}  {mutant.change}", flush=True)
    minutes = round((time.monotonic() - began) / 60, 1)
    print(json.dumps({"seed": asked.seed, **counts, "unlisted": unlisted, "minutes": minutes}))
    sys.exit(bool(unlisted))


if __name__ == "__main__":
    main()

"""What the house keeps to, counted over the tree: `python -m tests.tidy`. Each fault is one line; any makes the exit code 1.

The limits and the named exceptions stand in `tidy.toml` beside this file. An exception that is no longer needed is a fault,
so that the lists only shrink; a budget that is raised is named in the CHANGELOG.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernel", "grammars", "models", "sds", "benchmarks")
LINKED = PACKAGES[:3] + PACKAGES[4:]  # `sds/kernel` and so on are links: each file is counted once


@dataclass(frozen=True)
class Source:
    """One Python file. `path`: as git names it."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def words(self) -> tuple[tuple[int, str], ...]:
        """Every name, comment and docstring, with its line. Other strings may be stored or typed by users."""
        docs = {id(doc): doc for node in ast.walk(self.tree) if (doc := _docstring(node)) is not None}
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        named = [(at.start[0], at.string) for at in tokens if at.type in (tokenize.NAME, tokenize.COMMENT)]
        return (*named, *((doc.lineno, str(doc.value)) for doc in docs.values()))

    @property
    def messages(self) -> tuple[tuple[int, str], ...]:
        """Every text of several words, with its line: what people read. One word may be stored, or typed by users."""
        texts = [node for node in ast.walk(self.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return tuple((text.lineno, str(text.value)) for text in texts if len(str(text.value).split()) > 1)


def sources(root: Path, folders: Iterable[str] = (*PACKAGES, "tests")) -> list[Source]:
    """Read every Python file below some folders of a tree, links left out."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    kept = [
        path
        for path in paths
        if not (set(path.relative_to(root).parts[1:2]) & set(LINKED) and path.is_relative_to(root / "sds"))
    ]
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in kept]


def long_files(files: list[Source], limit: int, known: dict[str, int]) -> Iterator[str]:
    yield from _over("lines", {file.path: file.lines for file in files}, limit, known)


def full_folders(files: list[Source], limit: int, known: dict[str, int]) -> Iterator[str]:
    """Yield folders of more modules than the limit, `__init__` not counted; of a known one, more than it had."""
    counts = defaultdict[str, int](int)
    for file in files:
        counts[file.folder] += not file.path.endswith("/__init__.py")
    yield from _over("modules", counts, limit, known)


def long_functions(files: list[Source], limit: int, known: dict[str, int]) -> Iterator[str]:
    counts = dict[str, int]()
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                name = f"{file.path}:{node.name}"
                counts[name] = max(counts.get(name, 0), node.end_lineno - node.lineno + 1)
    yield from _over("lines", counts, limit, known)


def _over(what: str, counts: dict[str, int], limit: int, known: dict[str, int]) -> Iterator[str]:
    for name, count in counts.items():
        if count > max(limit, known.get(name, 0)):
            yield f"{name}: {count} {what}, over {max(limit, known.get(name, 0))}"
    for name, was in known.items():
        if counts.get(name, 0) < was:
            yield f"{name}: no longer {was} {what}; write {counts.get(name, 0)} in tidy.toml, or take the exception out"


def private_names(files: list[Source]) -> Iterator[str]:
    """Yield what is taken of another module although its name says that it is that module's own."""
    for file in files:
        modules = set[str]()
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sds":
                modules.update(alias.asname or alias.name for alias in node.names if alias.name.islower())
                for alias in node.names:
                    if _is_private(alias.name):
                        yield f"{file.path}:{node.lineno}: `{alias.name}` of {node.module} is private"
        for node in ast.walk(file.tree):
            match node:
                case ast.Attribute(ast.Name(owner), attr) if owner in modules and _is_private(attr):
                    yield f"{file.path}:{node.lineno}: `{owner}.{attr}` is private"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def twin_classes(files: list[Source]) -> Iterator[str]:
    """Yield public classes that share a name within one package: one word, one thing."""
    places = defaultdict[tuple[str, str], list[str]](list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[file.package, node.name].append(file.path)
    yield from (f"class {name}: in {' and '.join(paths)}" for (_, name), paths in places.items() if len(paths) > 1)


def backend_folders(files: list[Source]) -> dict[str, str]:
    """Return the name of every backend, as its own `facts.py` says it, and its folder."""
    names = dict[str, str]()
    for file in files:
        for node in ast.walk(file.tree) if file.path.endswith("/facts.py") else ():
            match node:
                case ast.Call(func=ast.Name("BackendFacts"), keywords=said):
                    given = [each.value for each in said if each.arg == "name" and isinstance(each.value, ast.Constant)]
                    names |= {str(name.value): f"{file.folder}/" for name in given}
    return names


def backend_names(files: list[Source], names: dict[str, str], factories: list[str]) -> Iterator[str]:
    """Yield a backend's name as a literal outside its own folder and the lists of all backends."""
    for file in files:
        if file.path in factories:
            continue
        docs = {id(doc) for node in ast.walk(file.tree) if (doc := _docstring(node)) is not None}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and id(node) not in docs and isinstance(node.value, str):
                own = names.get(node.value)
                if own is not None and not file.path.startswith(own):
                    yield f'{file.path}:{node.lineno}: "{node.value}" is named in {own} and the factory only'


def banned_words(files: list[Source], words: list[str], unsaid: list[str]) -> Iterator[str]:
    """Yield words that no textbook has, in names, comments and docstrings, and the `unsaid` of them in messages; parts of
    a name count, too.
    """
    for file in files:
        for places, banned in ((file.words, words), (file.messages, unsaid)):
            pattern = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(map(re.escape, banned))})(?![A-Za-z])", re.IGNORECASE)
            for line, word in places:
                yield from (f"{file.path}:{line}: `{match.group()}`" for match in pattern.finditer(word))


def unreached(files: list[Source], known: list[str]) -> Iterator[str]:
    """Yield public functions and classes that nothing outside tests names, and exceptions that something names."""
    named = defaultdict[str, int](int)
    for file in files:
        for word in re.findall(r"\w+", file.text):
            named[word] += 1
    defined = set[str]()
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                name = f"{file.path}:{node.name}"
                defined.add(name)
                if named[node.name] == 1 and not node.decorator_list and name not in known:
                    yield f"{name}: nothing outside tests uses it"
    yield from (f"{name}: no such exception is needed" for name in known if name not in defined)


def over_budget(files: list[Source], budgets: dict[str, int], core: list[str], core_max: int) -> Iterator[str]:
    counts = line_counts(files, core)
    for name, limit in {**budgets, "core": core_max}.items():
        if counts[name] > limit:
            yield f"{name}: {counts[name]} lines, over its budget of {limit}"


def line_counts(files: list[Source], core: list[str]) -> dict[str, int]:
    """Return the lines of each package, and of the core."""
    counts = defaultdict[str, int](int)
    for file in files:
        counts[file.package] += file.lines
        counts["core"] += file.lines if any(_within(file.path, part) for part in core) else 0
    return counts


def _within(path: str, part: str) -> bool:
    return path == part or path.startswith(part.rstrip("/") + "/")


def _docstring(node: ast.AST) -> ast.Constant | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return first.value
    return None


def faults(root: Path, limits: dict[str, Any]) -> list[str]:
    """Return every fault of a tree. `limits`: as `tidy.toml` holds them."""
    everything = sources(root)
    ours = [file for file in everything if file.package != "tests"]
    return [
        *long_files(everything, limits["file_lines_max"], limits["files"]),
        *full_folders(everything, limits["folder_modules_max"], limits["folders"]),
        *long_functions(ours, limits["function_lines_max"], limits["functions"]),
        *private_names(ours),
        *twin_classes(ours),
        *backend_names(ours, backend_folders(ours), limits["backends"]["factories"]),
        *banned_words(ours, limits["words"]["banned"], limits["words"]["unsaid"]),
        *unreached(ours, limits["unreached"]),
        *over_budget(everything, limits["lines"], limits["core"]["parts"], limits["core"]["lines_max"]),
    ]


def main() -> None:
    limits = tomllib.loads(Path(__file__).with_name("tidy.toml").read_text(encoding="utf-8"))
    found = faults(ROOT, limits)
    print("\n".join(found) or "tidy")
    counts = line_counts(sources(ROOT), limits["core"]["parts"])
    print(
        " · ".join(
            f"{name} {counts[name]} of {limit}"
            for name, limit in {**limits["lines"], "core": limits["core"]["lines_max"]}.items()
        )
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

"""The reference pages say what the program does: neither can change without the other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sds.kernel.contract import expressions, sections, yaml_lines
from sds.kernel.contract import schema as contract
from sds.kernel.contract import types as contract_types

ROOT = Path(__file__).parents[1]


def test_the_command_line_page_is_what_the_program_says_of_itself() -> None:
    command = [
        sys.executable,
        "-m",
        "typer",
        "sds.cli.app",
        "utils",
        "docs",
        "--name",
        "sds",
        "--title",
        "Command line",
    ]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=120).stdout
    assert said.strip() == (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").strip(), "run `make docs`"


def test_the_contract_page_names_every_field_of_a_contract() -> None:
    page = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    models = [m for m in vars(sections).values() if isinstance(m, type) and issubclass(m, BaseModel)]
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", page))))
    missing = {field for model in models for field in model.model_fields if field not in named}
    assert set() == missing


def test_the_fraud_gate_of_the_contract_page_is_a_contract() -> None:
    page = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(gate: .*?)```", page, re.DOTALL)
    fraud = contract.parse_contract(text)
    assert ("BLOCK", ["CHALLENGE"]) == (fraud.refusal, [kind for kind in fraud.kinds if kind in fraud.orders])


def test_the_floors_are_drawn_in_the_order_that_is_checked() -> None:
    """What is drawn higher may import what is drawn lower, in the house and within kernel and models."""
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    house = re.findall(r"^ ([a-z][a-z ·]*?)  ", drawing, re.MULTILINE)
    models = re.findall(r"^.{42}│ ([a-z0-9_]+(?:(?: │|,) [a-z0-9_]+)*)", drawing, re.MULTILINE)
    kernel = re.findall(r"^(?:   )?([a-z]+(?:(?: │|,) [a-z]+)*)(?:  |$)", drawing.split("\n kernel\n")[1], re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    checked = {each.get("containers", [""])[0]: each["layers"] for each in settings if each["type"] == "layers"}
    for container, drawn in (("sds", house), ("sds.models", models), ("sds.kernel", kernel)):
        floors = {name: n for n, layer in enumerate(checked[container]) for name in re.findall(r"\w+", layer)}
        names = [name for line in drawn for name in re.findall(r"\w+", line)]
        boxes = {"grammars", "models", "kernel"} if container == "sds" else set()
        assert floors.keys() - boxes == set(names), container
        assert [floors[name] for name in names] == sorted(floors[name] for name in names), container


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[^`]*\.py)`", page))
    assert len(named) > 20
    assert set() == {name for name in named if not (ROOT / name).exists()}


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_of_every_page_leads_to_a_file_and_a_heading() -> None:
    lost, followed = [], 0
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _prose(page)):
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            followed += 1
            if not there.exists() or (anchor and anchor not in _anchors(there)):
                lost.append((page.name, target))
    assert [] == lost
    assert followed > 50


def _limits(schema: Any, types: Any, at: str) -> Iterator[str]:
    """Yield a row for each limit that the loader's own types have below `at`."""
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _limits(each, types, at)
    if "$ref" in schema:
        yield from _limits(types[schema["$ref"].rsplit("/")[-1]], types, at)
    least, most = (
        next((schema[key] for key in _KEYWORDS if key in schema and key.startswith(end)), None)
        for end in ("min", "max")
    )
    if (least, most) != (None, None):
        yield f"| `{at}` | {'' if least is None else least} | {'' if most is None else most} |"
    for name, inner in schema.get("properties", {}).items():
        yield from _limits(inner, types, f"{at}.{name}".lstrip("."))
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from _limits(inner, types, f"{at}.*")
    if isinstance(inner := schema.get("items"), dict):
        yield from _limits(inner, types, f"{at}[]")


_KEYWORDS = tuple(f"{end}{what}" for end in ("min", "max") for what in ("imum", "Items", "Properties", "Length"))


def test_the_contract_page_has_every_limit_that_the_loader_enforces() -> None:
    schema = contract.Contract.model_json_schema()
    page = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    rows = [
        row for row in _limits(schema, schema["$defs"], "") if not row.startswith(("| `human.kinds.", "| `show[]`"))
    ]
    told = page.partition("## Limits")[2].partition("## Checking")[0]
    assert "| `kinds.*.reasons` | 1 | 32 |" in rows
    assert rows == [line for line in told.splitlines() if line.startswith("| `")]
    words = " ".join(told.split())
    assert f"at most {yaml_lines.FILE_BYTES_MAX} bytes and is nested at most {yaml_lines.DEPTH_MAX} deep" in words
    assert (
        f"at most {expressions.EXPRESSION_CHARS_MAX} characters and is nested at most {expressions.DEPTH_MAX}" in words
    )
    assert f"at most {contract_types.LEVELS_MAX} words" in words


def test_nothing_that_is_installed_says_to_look_into_a_folder_that_only_a_checkout_has() -> None:
    """No wheel has `docs`: messages name a page of the documentation. What only readers of the source see may say where."""
    saying = [f"{path}: {text}" for path in shipped() for text in said_by(path) if re.search(r"\bdocs/", text)]
    assert [] == saying


def shipped() -> Iterator[Path]:
    for folder in ("sds", "kernel", "grammars", "models", "benchmarks"):
        yield from (each for each in sorted((ROOT / folder).rglob("*")) if each.suffix in (".py", ".yaml", ".html"))


def said_by(path: Path) -> Iterator[str]:
    """Yield the texts of a file; of a module those that are no docstrings, of the template that `sds new` copies all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py" or "template" in path.parts:
        yield text
        return
    tree = ast.parse(text)
    docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in docs:
            yield each.value

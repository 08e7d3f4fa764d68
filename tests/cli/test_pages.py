"""Every command that a page, the image or the unit names is one, and every file that a page shows is read by its reader."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sds.cli.app import app
from sds.engines.config import parse_engines
from sds.executors.http.executor import parse_gateway
from sds.kernel.contract.schema import Contract, parse_contract
from tests.cli.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ROOT / "docs" / "cli.md"  # its blocks are lines of usage: only its examples are typed
UNIT, IMAGE = ROOT / "deploy" / "sds.service", ROOT / "Containerfile"
WRAPPERS = {"time", "opentelemetry-instrument"}
LEFT_OUT = {"MissingParameter", "BadOptionUsage"}  # what prose may do: name a command without all that it needs


def _code(page: Path) -> tuple[list[str], str]:
    """Return the fenced blocks of a page, with their languages as first lines, and its text without them."""
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"^```(\w*\n.*?)^```$", re.DOTALL | re.MULTILINE)
    return fence.findall(text), fence.sub("", text)


def _typed(page: Path) -> Iterator[str]:
    """Yield the lines that a reader types as they stand."""
    blocks, prose = _code(page)
    for block in blocks if page != GENERATED else ():
        language, *lines = block.splitlines()
        yield from (line.removeprefix("$ ") for line in lines if language in ("", "console"))
    yield from re.findall(r"^ {4}(sds .*)$", prose, re.MULTILINE)
    yield from re.findall(r"^Example: (.*)$", prose, re.MULTILINE)


def _named(page: Path) -> Iterator[str]:
    """Yield what stands as code within sentences; a line may end within it."""
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]*)`", _code(page)[1]))


def _shipped() -> Iterator[str]:
    """Yield the commands of the image and of the unit, those in their heads included."""
    unit, image = UNIT.read_text(encoding="utf-8"), IMAGE.read_text(encoding="utf-8")
    yield re.findall(r"^ExecStart=/opt/sds/bin/(.*)$", unit, re.MULTILINE)[0]
    yield " ".join(json.loads(re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)[-1]))
    yield from re.findall(r"\b(sds keys add .*)$", unit + image, re.MULTILINE)


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the words behind `sds` of each command of a shell's line."""
    if "sds " not in line:
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for operator, group in groupby(lexer, key=lambda word: set(word) <= set("|&;<>()")):
        words = [word for word in group if word not in WRAPPERS]
        if not operator and words[0] == "sds" and words[1:]:
            yield words[1:]


SAID = [
    *((page, line, True) for page in PAGES for line in _typed(page)),
    *((page, line, False) for page in PAGES for line in _named(page)),
    *((UNIT, line, True) for line in _shipped()),
]
COMMANDS = sorted({(page.name, whole, *words) for page, line, whole in SAID for words in _commands(line)})


GATE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[-1]


@cache
def _options_of_a_benchmark(question: str) -> set[str]:
    command = [sys.executable, "-m", f"sds.benchmarks.{question}", "-h"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=120).stdout
    return set(re.findall(r"--[a-z][a-z-]*", said))


@cache
def _whole_command() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize(("page", "whole", "words"), [(p, w, words) for p, w, *words in COMMANDS], ids=str)
def test_every_command_exists_with_its_options(
    page: str, whole: bool, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parking.py").write_text(GATE, encoding="utf-8")  # a gate that is named by its path has to be there
    monkeypatch.chdir(tmp_path)
    command = _whole_command()
    context = command.context_class(command, info_name="sds")
    while hasattr(command, "resolve_command") and words:
        name, command, words = command.resolve_command(context, words)
        context = command.context_class(command, info_name=name, parent=context)
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    if context.info_name == "bench" and words and words[0].islower():
        known |= _options_of_a_benchmark(words[0])
    assert {word.partition("=")[0] for word in words if re.match("--[a-z]", word)} <= known, page
    if words[-1:] == ["..."] and not words[-2:][0].startswith("--"):
        words.pop()
    if not words and not whole:
        return
    try:
        command.make_context(str(context.info_name), words, parent=context.parent)
    except Exception as error:
        if whole or type(error).__name__ not in LEFT_OUT:
            raise


def test_the_commands_of_all_pages_are_found() -> None:
    assert {page.name for page in PAGES} >= {page for page, *_ in COMMANDS} - {UNIT.name}
    assert len(COMMANDS) > 200


# What parts of a contract are shown for: a whole one takes them up, in place of what it has under the same names.
AROUND = """
gate: pages
agent_id: pages-agent
version: 1.0.0
owner: pages@desk.example
effective_from: 2024-01-01
mission: Decide whether a passenger is paid.
authority: [COMPENSATE, VOUCHER, DENY]
event: {id: claim_id, key: ticket_id, evidence: text}
snapshot:
  flight.arr_delay_min: int
  ticket.fare_minor: fixed(2)
  payment.amount_minor: fixed(2)
  customer.count_1d: int
kinds:
  COMPENSATE:
    params: {amount: {lo: 1, hi: ticket.fare_minor, scale: 2}}
    draws: {ticket.fare_minor: amount}
    spends: amount
    reasons: [LATE]
  VOUCHER:
    params: {amount: {lo: 1, hi: ticket.fare_minor, scale: 2}}
    draws: {ticket.fare_minor: amount}
    spends: amount
    reasons: [GOODWILL]
  DENY: {reasons: [NOT_ELIGIBLE]}
readings:
  mood: {question: How is it written, values: {calm: calmly, angry: in anger}}
policy:
  - {kind: DENY, reason: NOT_ELIGIBLE, when: "reading.mood == 'angry'"}
  - otherwise: MODEL
"""


# What stands around a part of a gateway's file.
GATEWAY = """
address: https://payments.example
idempotent: true
currency: EUR
reply: {key: order.key}
order: {path: /orders, key_header: Idempotency-Key, settled: [{status: [201]}]}
statement:
  path: /orders
  lines: orders
  line: {key: order.key, outcome: state, outcomes: {paid: settled}, at: {field: at}}
"""


def _merged(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _merged(whole[name], value) for name, value in part.items() if isinstance(whole.get(name), dict)}
    return {**whole, **part, **nested}


def _shown() -> Iterator[tuple[Path, str]]:
    """Yield each YAML file, or part of one, that a page shows; of the contract's pages, what stands within sentences, too."""
    for page in PAGES:
        for block in _code(page)[0]:
            if block.startswith("yaml\n"):
                yield page, block.partition("\n")[2]
        for code in _named(page) if page.stem in ("contract", "judgement") else ():
            if re.match(rf"({'|'.join(Contract.model_fields)}): ", code) and "..." not in code:
                yield page, code


def _read(text: str) -> None:
    """Have a text read by what reads such files: one of engines, a gateway's, a contract, or a part of one."""
    parts = yaml.safe_load(text)
    if "engines" in parts:
        parse_engines(text, name="page")
    elif "address" in parts:
        parse_gateway(text, "page")
    elif {"order", "statement"} <= {*parts}:
        parse_gateway(yaml.safe_dump(_merged(yaml.safe_load(GATEWAY), parts)), "page")
    elif "rule_files" in parts:  # of Prometheus
        assert all((ROOT / "deploy" / name).is_file() for name in parts["rule_files"])
    elif "gate" in parts:
        parse_contract(text)
    else:
        replaced = {
            *parts,
            *(("readings", "policy") if "rationale" in parts else ()),
        }  # a policy writes none before it decides
        around = re.split(r"^(?=\w)", AROUND, flags=re.MULTILINE)
        parse_contract("".join(part for part in around if part.partition(":")[0] not in replaced) + text)


@pytest.mark.parametrize(("page", "text"), list(_shown()), ids=lambda each: getattr(each, "name", None))
def test_every_yaml_file_that_a_page_shows_is_read(page: Path, text: str) -> None:
    _read(text)

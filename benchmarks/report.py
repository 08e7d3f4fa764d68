"""Make one page of what was kept of all questions: `sds bench report --results FOLDER --page FILE`.

Every figure on the page is in one of the documents in that folder; the plots lie beside the page. A question that was not
asked is named, never guessed at, and so is every row in which somebody else is the quicker one. Its folder `elsewhere` may
hold a folder for each other machine, or choice of weights: of their documents the page shows what was reached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from sds.benchmarks.lib.measuring import Parser, Report, Say, main, write_whole
from sds.benchmarks.page import tables, targets
from sds.benchmarks.page.tables import SECTIONS, table
from sds.benchmarks.page.targets import Judged, Target
from sds.kernel.errors import UsageError

RESULTS, PAGE = Path("benchmarks/results"), Path("benchmarks/report.md")
ELSEWHERE = "elsewhere"
RESULT_BYTES_MAX = 1 << 24
Results = Mapping[str, Report]

BIAS = """This benchmark is ours, and so is what it praises. What that means for its figures:

- The task is ours: decisions of one fixed form, 70 to 100 tokens, most of them the reference at the end, of which few are
  chosen. Engines made for free text or any grammar do more than it asks, and are not measured at what they are made for.
- Every peer is given the exact language of each packet, its best mode as far as we found it, a prompt laid out for its
  cache, and a process of its own; but we know our own engine better. Whoever finds a better mode: it is a file in
  `benchmarks/peer/drivers/`.
- Weights, library and data type are those that `sds models prepare` found quickest for ours on this machine. Peers run the
  same file, in the library that each is made for: those on transformers in the quicker of two data types, OpenVINO GenAI
  with the same weights as F16. On a processor without BF16 that file is not llama.cpp's quickest. Where ours multiplies in
  int8, which no peer does with this file, `ours-bf16` or `ours-fp32` is ours without it, and its ratios to the fastest peer
  are judged, too; the other ratios and `throughput` are of ours as it runs. Where ours runs in another library than
  llama.cpp, which most peers run in, `ours-llamacpp` is ours in llama.cpp: over it a peer differs by the decoder, from it
  to ours by the library.
- The small model suits us: passes are short, so what surrounds them shows. With a larger one everything but the number of
  passes matters less.
- Ratios are of one run on one machine. Times of different runs, or of different machines, are not to be compared."""


def read_results(folder: Path) -> dict[str, Report]:
    """Return the documents by question. Raises UsageError for a file that is no such document."""
    if not folder.is_dir():
        raise UsageError(f"`{folder}` is no folder", hint="sds bench QUESTION --save FOLDER makes one")
    return {name: _read(path, name) for name in SECTIONS if (path := folder / f"{name}.json").exists()}


def read_elsewhere(folder: Path) -> dict[str, dict[str, Report]]:
    """Return the documents of other machines, by their folders' names. Raises UsageError as `read_results` does."""
    folders = sorted(path for path in (folder / ELSEWHERE).glob("*") if path.is_dir())
    return {each.name: found for each in folders if (found := read_results(each))}


def _read(path: Path, name: str) -> Report:
    try:
        with path.open("rb") as file:
            raw = file.read(RESULT_BYTES_MAX + 1)
        found = json.loads(raw) if len(raw) <= RESULT_BYTES_MAX else None
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {(error.strerror or 'unknown cause').lower()}") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("benchmark") != name:
        raise UsageError(f"`{path}` is no result of `sds bench {name}`", hint=f"sds bench {name} --save {path.parent}")
    return found


def page(results: Results, elsewhere: Mapping[str, Results] = MappingProxyType({})) -> tuple[str, dict[str, str]]:
    """Return the page in Markdown, and its plots by file name. Raises UsageError for a document that lacks something."""
    parts, plots = [_head(results)], dict[str, str]()
    for name, section in SECTIONS.items():
        if name in results:
            with _whole(name):
                text, drawn = section(results[name])
            parts.append("\n\n".join([text, *(f"![{file.removesuffix('.svg')}]({file})" for file in drawn)]))
            plots |= drawn
    if elsewhere:
        parts.append(_elsewhere(elsewhere))
    return "\n\n".join([*parts, f"## Our bias\n\n{BIAS}\n"]), plots


@contextmanager
def _whole(name: str) -> Iterator[None]:
    """Refuse a document that lacks what is asked of it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"the result of `sds bench {name}` lacks what the page shows", hint="measure it again"
        ) from error


def _head(results: Results) -> str:
    missing = [name for name in SECTIONS if name not in results]
    lines = ["# What decisions cost, here and elsewhere"]
    lines.append(
        "Written by `sds bench report` from the documents that `sds bench QUESTION --save` keeps; nothing here is typed in\n"
        "by hand. [docs/benchmarks.md](../docs/benchmarks.md) says what each question asks."
    )
    if missing:
        asked = ", ".join(f"`{name}`" for name in missing)
        lines.append(f"**Not measured: {asked}.** What these would say is left out.")
    if len({tuple(map(found.get, ("machine", "features", "cores"))) for found in results.values()}) > 1:
        lines.append("**Not all was measured on one machine**: compare only within a section.")
    lines.append(f"## How it was measured\n\n{_how(results)}")
    lines.append(f"## What it must reach\n\n{_judged(dict(targets.judged(results)))}")
    lines.append(f"## Where others are quicker\n\n{_wins(results)}")
    return "\n\n".join(lines)


def _elsewhere(results: Mapping[str, Results]) -> str:
    lines = [
        "## On other machines, or with other weights",
        "Each measured on its day, with the code of that day; ratios are of one run.",
    ]
    for name, found in results.items():
        asked = {target: judged for target, judged in targets.judged(found) if target.question in found}
        lines += [f"### {name}", _how(found), _judged(asked)]
    return "\n\n".join(lines)


def _how(results: Results) -> str:
    rows = [
        [
            name,
            f"`{found.get('command', '-')}`",
            found.get("date"),
            found.get("code"),
            " ".join(filter(None, (found.get("machine"), found.get("features")))),
            found.get("cores"),
            found.get("n"),
            _weights(found.get("model")),
            ", ".join(f"{library} {number}" for library, number in found.get("versions", {}).items()),
        ]
        for name, found in results.items()
    ]
    return table(["question", "command", "date", "commit", "machine", "cores", "N", "weights", "versions"], rows)


def _weights(model: object) -> str | None:
    if isinstance(model, Mapping):
        library = f", in {model['library']}" if "library" in model else ""
        library += f" in {model['dtype']}" if "dtype" in model else ""
        return f"{model.get('name')}, SHA-256 {str(model.get('sha256'))[:12]}{library}"
    return None if model is None else str(model)


def _judged(found: Mapping[Target, Judged]) -> str:
    rows = [
        [target.figure, f"`{target.question}`", target.said, judged.value, judged.verdict]
        for target, judged in found.items()
    ]
    return table(["figure", "question", "target", "measured", ""], rows)


def _wins(results: Results) -> str:
    compared = [name for name in targets.COMPARING if name in results]
    if not compared:
        return "No question that asks others was measured."
    found: list[str] = []
    for name in compared:
        with _whole(name):
            found += targets.COMPARING[name](results[name])
    asked = ", ".join(f"`{name}`" for name in compared)
    return "\n".join(f"- {line}" for line in found) or f"Nowhere, in what was measured of {asked}."


def _options(parser: Parser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that --save wrote to")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; its plots lie beside it")


def _run(asked: argparse.Namespace, _say: Say) -> Report:
    results = read_results(asked.results)
    if not results:
        raise UsageError(f"`{asked.results}` holds no result", hint="sds bench QUESTION --save FOLDER")
    if asked.page.is_dir() or not asked.page.parent.is_dir():
        raise UsageError(f"`{asked.page}` cannot be written", hint="name a file in a folder that is there")
    text, plots = page(results, read_elsewhere(asked.results))
    for name, svg in plots.items():
        write_whole(asked.page.parent / name, svg)
    write_whole(asked.page, text)
    return {
        "benchmark": "report",
        "page": str(asked.page),
        "plots": sorted(plots),
        "missing": [name for name in tables.SECTIONS if name not in results],
        "targets": [
            {"figure": target.figure, "question": target.question, "target": target.said, "measured": found.value}
            | {"reached": found.reached}
            for target, found in targets.judged(results)
        ],
    }


def _show(report: Report) -> None:
    for target in report["targets"]:
        reached = {True: "reached", False: "MISSED", None: "-"}[target["reached"]]
        print(f"{reached:<8} {target['figure']}: {target['measured']}, target {target['target']}")
    print(f"wrote {report['page']}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)

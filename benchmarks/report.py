"""Make one page from the saved documents of all questions: `sds bench report --results FOLDER --page FILE`.

Every figure on the page is in a document in that folder; the plots lie beside the page. The page names each question
without a document, and each row in which a peer is quicker. The subfolder `elsewhere` may hold a folder for each other
machine or choice of weights: of their documents the page shows which targets they reach.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from sds.benchmarks.lib.measuring import Parser, Report, Say, main, write_whole
from sds.benchmarks.page import targets
from sds.kernel.errors import UsageError, cause_of

# In the order of the page.
QUESTIONS = ("hotpath", "readings", "peers", "throughput", "grammar", "kernel", "scaling", "service", "store", "gpu")
RESULTS, PAGE = Path("benchmarks/results"), Path("benchmarks/report.md")
ELSEWHERE = "elsewhere"
RESULT_BYTES_MAX = 1 << 24
Results = Mapping[str, Report]


def read_results(folder: Path) -> dict[str, Report]:
    """Return the documents by question. Raises UsageError for a file that is no such document."""
    if not folder.is_dir():
        raise UsageError(f"`{folder}` is not a folder", hint="make one with sds bench QUESTION --save FOLDER")
    return {name: _read(path, name) for name in QUESTIONS if (path := folder / f"{name}.json").exists()}


def read_elsewhere(folder: Path) -> dict[str, dict[str, Report]]:
    """Return the documents of other machines, by their folders' names. Raises UsageError as `read_results` does."""
    folders = sorted(path for path in (folder / ELSEWHERE).glob("*") if path.is_dir())
    return {each.name: found for each in folders if (found := read_results(each))}


def _read(path: Path, name: str) -> Report:
    try:
        with path.open("rb") as file:
            raw = file.read(RESULT_BYTES_MAX + 1)
        document = json.loads(raw) if len(raw) <= RESULT_BYTES_MAX else None
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {cause_of(error)}") from error
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("benchmark") != name:
        raise UsageError(
            f"`{path}` is not a result of `sds bench {name}`", hint=f"sds bench {name} --save {path.parent}"
        )
    return document


def page(results: Results, elsewhere: Mapping[str, Results] = MappingProxyType({})) -> tuple[str, dict[str, str]]:
    """Return the page in Markdown, and its plots by file name. Raises UsageError where a document lacks something, or the
    extra `bench` is not installed.
    """
    try:
        from sds.benchmarks.page.plots import PLOTS  # noqa: PLC0415  both need the extra `bench`
        from sds.benchmarks.page.rendering import section, whole  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UsageError(f"the page needs `{error.name}`, which is not installed", hint="make peers") from error
    sections, plots = list[str](), dict[str, str]()
    for name, found in ((name, results[name]) for name in QUESTIONS if name in results):
        with _complete(name):
            sections.append(section(name, found))
            if name in PLOTS:
                file, draw = PLOTS[name]
                plots[file] = draw(found)
                sections.append(f"![{file.removesuffix('.svg')}]({file})")
    text = whole(
        results=results,
        missing=[name for name in QUESTIONS if name not in results],
        targets=targets.judged(results),
        wins=list(_wins(results)),
        compared=[name for name in targets.COMPARING if name in results],
        sections=sections,
        elsewhere={name: {"results": found, "targets": _asked(found)} for name, found in elsewhere.items()},
    )
    return text, plots


@contextmanager
def _complete(name: str) -> Iterator[None]:
    """Raise UsageError where a block finds that a document lacks something."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"the result of `sds bench {name}` lacks values that the page shows", hint="measure it again"
        ) from error


def _asked(results: Results) -> list[tuple[targets.Target, targets.Judged]]:
    return [(target, found) for target, found in targets.judged(results) if target.question in results]


def _wins(results: Results) -> Iterator[str]:
    for name, wins in targets.COMPARING.items():
        if name in results:
            with _complete(name):
                yield from wins(results[name])


def _options(parser: Parser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that --save wrote to")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; its plots lie beside it")


def _run(asked: argparse.Namespace, _say: Say) -> Report:
    results = read_results(asked.results)
    if not results:
        raise UsageError(f"`{asked.results}` holds no result", hint="sds bench QUESTION --save FOLDER")
    if asked.page.is_dir() or not asked.page.parent.is_dir():
        raise UsageError(f"`{asked.page}` cannot be written", hint="name a file in a folder that exists")
    text, plots = page(results, read_elsewhere(asked.results))
    for name, svg in plots.items():
        write_whole(asked.page.parent / name, svg)
    write_whole(asked.page, text)
    return {
        "benchmark": "report",
        "page": str(asked.page),
        "plots": sorted(plots),
        "missing": [name for name in QUESTIONS if name not in results],
        "targets": [
            {"figure": target.figure, "question": target.question, "target": target.limit, "measured": found.value}
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

"""Write one card's page from the document of `sds bench gpu`: `python -m sds.benchmarks.card.page RESULT.json PAGE.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sds.benchmarks.page.rendering import section

HEAD = """# On a card

`benchmarks/card/kit.sh KIT` packs what a machine with a card and no network needs; `KIT/run.sh OUT` measures there, in one
call, and writes this page. {date}, {machine}, {cores} cores; {versions}; commit {code}: `{command}`

"""


def main() -> None:
    result, page = map(Path, sys.argv[1:])
    found = json.loads(result.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    page.write_text(HEAD.format_map(found | {"versions": versions}) + section("gpu", found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""`sds`, but the language model is a script: `python -m tests.load.scripted serve --gate tests/load/scripted`."""

from __future__ import annotations

from sds.cli import main
from sds.service.server import serving
from tests.proposers import Greedy

serving._open_model = lambda settings: Greedy("WAIVE")

if __name__ == "__main__":
    main()

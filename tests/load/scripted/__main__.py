"""`sds` with a script for the language model: `python -m tests.load.scripted serve --gate tests/load/scripted`."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from sds.cli import main
from sds.service.server import serving
from tests.proposers import Greedy

if __name__ == "__main__":
    with patch.object(serving, "serve", partial(serving.serve, open_model=lambda _: Greedy("WAIVE"))):
        main()

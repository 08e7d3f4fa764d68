"""`python -m tests.service.server.driver GATE DRAIN_S`: serves a gate that decides nothing until a test lets it go."""

from __future__ import annotations

import sys
from pathlib import Path

from sds.service.callers import digest_of
from sds.service.server.serving import address_of, bound, serve
from sds.service.settings import ServiceSettings
from tests.service.engines import HeldByFiles

KEY = "sds_" + "k" * 43


def main() -> None:
    gate, drain_s = Path(sys.argv[1]), float(sys.argv[2])
    settings = ServiceSettings(gates=(str(gate),), drain_s=drain_s, dev=True, dev_keys=(digest_of(KEY),))
    engine = HeldByFiles(gate.parent)
    with bound("127.0.0.1", 0) as listener:
        serve(settings, listener, lambda: print(address_of(listener), flush=True), open_model=lambda _: engine)


if __name__ == "__main__":
    main()

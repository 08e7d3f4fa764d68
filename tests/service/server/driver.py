"""`python -m tests.service.server.driver GATE TAKES_S [DRAIN_S]`: serves a gate that needs no model, each decision for TAKES_S."""

from __future__ import annotations

import sys

from sds.service.callers import digest_of
from sds.service.server.serving import address_of, bound, serve
from sds.service.settings import ServiceSettings
from tests.service.engines import Slow

KEY = "sds_" + "k" * 43


def main() -> None:
    gate, takes_s, drain_s = sys.argv[1], float(sys.argv[2]), float([*sys.argv, "10"][3])
    settings = ServiceSettings(gates=(gate,), drain_s=drain_s, dev=True, dev_keys=(digest_of(KEY),))
    with bound("127.0.0.1", 0) as listener:
        serve(settings, listener, lambda: print(address_of(listener), flush=True), open_model=lambda _: Slow(takes_s))


if __name__ == "__main__":
    main()

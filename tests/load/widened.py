"""`sds` with the refund gate's limits raised so that an hour of load reaches none: `python -m tests.load.widened serve --gate
refund`. The gate's readers, policy and rail are the released ones.
"""

from __future__ import annotations

from dataclasses import replace

from sds.cli import main
from sds.gates.refund import gate as released
from sds.kernel.contract.schema import Contract, parse_contract

WIDER = {
    "max_minor: 20000000}": "max_minor: 200000000000}",
    "max_minor: 200000000}": "max_minor: 2000000000000}",
    "per_hour: 2500": "per_hour: 1000000",
}


def contract() -> Contract:
    text = released.CONTRACT.read_text(encoding="utf-8")
    for limit, wider in WIDER.items():
        if text.count(limit) != 1:
            raise ValueError(f"the contract of the refund gate no longer says `{limit}`")
        text = text.replace(limit, wider)
    return parse_contract(text)


if __name__ == "__main__":
    released.gate = replace(released.gate, contract=contract)
    main()

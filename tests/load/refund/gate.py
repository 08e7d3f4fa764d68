"""The refund gate as it is released, with its readers, policy and rail, but without a limit that an hour of load would reach."""

from __future__ import annotations

from dataclasses import replace

from sds.gates.refund.gate import CONTRACT
from sds.gates.refund.gate import gate as released
from sds.kernel.contract.schema import Contract, parse_contract

WIDER = {
    "max_minor: 20000000}": "max_minor: 200000000000}",
    "max_minor: 200000000}": "max_minor: 2000000000000}",
    "per_hour: 2500": "per_hour: 1000000",
}


def contract() -> Contract:
    text = CONTRACT.read_text(encoding="utf-8")
    for released_as, wider in WIDER.items():
        if text.count(released_as) != 1:
            raise ValueError(f"the contract of the refund gate no longer says `{released_as}`")
        text = text.replace(released_as, wider)
    return parse_contract(text)


gate = replace(released, contract=contract)

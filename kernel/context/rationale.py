"""The rationale that is written after a decision: one RATIONALE entry in the ledger, at most one for a flow.

It is a comment. Nothing is permitted, refused or done because of it: what it says cannot matter, and losing it loses
nothing else. The entry holds the sealed text, and no table repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.proposal import TEXT_CHARS
from sds.kernel.errors import UsageError
from sds.kernel.registry.contract_versions import recorded_contract
from sds.kernel.storage import ledger
from sds.kernel.storage.keyring import is_sealed_text
from sds.kernel.storage.store import Reader, Store
from sds.kernel.storage.vault import RATIONALE, SEALED, key_for_flow

KIND = "RATIONALE"
_TEXT = re.compile(TEXT_CHARS + "*")
_FLOW = """
SELECT f.contract_hash, d.body, r.idx FROM decision_flows f
LEFT JOIN ledger d ON d.dfid = f.dfid AND d.kind = 'DECIDED'
LEFT JOIN ledger r ON r.dfid = f.dfid AND r.kind = 'RATIONALE'
WHERE f.dfid = ?
"""


def explain(store: Store, contract: Contract, dfid: str, text: str, *, now_ms: int) -> None:
    """Record why a flow was decided as it was. Raises UsageError when that is not, or no longer, permitted."""
    objection = fault(contract, text)
    if objection is None:
        with store.transaction():
            objection = _objection(store.row(_FLOW, (dfid,)), contract)
            if objection is None:
                ledger.append(store, now_ms, KIND, dfid, {SEALED: key_for_flow(store, dfid).seal_text(RATIONALE, text)})
    if objection is not None:
        raise UsageError(f"no rationale is recorded: {objection}", reason_code="RATIONALE_REFUSED", dfid=dfid)


def fault(contract: Contract, text: str) -> str | None:
    """Return why `text` is no rationale of a decision under this contract; None: it is one."""
    longest = contract.explanation_chars_max
    if not longest:
        return "the contract asks for none after the decision"
    if len(text) > longest:
        return f"it is longer than {longest} characters"
    return None if _TEXT.fullmatch(text) else "it has characters that no rationale may have"


def _objection(flow: tuple[Any, ...] | None, contract: Contract) -> str | None:
    if flow is None:
        return "there is no such flow"
    contract_hash, decided, known = flow
    if contract_hash != contract.hash:
        return "the flow is under another contract"
    if decided is None:
        return "the flow is not decided"
    return "the flow has a rationale already" if known is not None else None


def _unsealable(contract: Contract, body: Mapping[str, Any]) -> str | None:
    """Return why this is no sealed rationale within the contract's bound, as far as that shows without its key, or None."""
    if body.keys() != {SEALED} or not contract.explanation_chars_max:
        return "not a rationale"
    return None if is_sealed_text(body[SEALED], contract.explanation_chars_max) else "not sealed, or too long"


class Explanations:
    """The RATIONALE entries in one check of the record. `fold` raises one of `NOT_AS_WRITTEN` for a malformed entry, and
    ContractError when the contract that bounds it cannot be read.
    """

    def __init__(self) -> None:
        self._explained: set[str] = set()
        self._terms: dict[str, Contract] = {}

    def fold(self, store: Reader, dfid: str, body: Mapping[str, Any]) -> None:
        """Fold one entry of a flow that is decided."""
        terms = self._terms_of(store, dfid)
        known = fault(terms, body["text"]) if body.keys() == {"text"} else _unsealable(terms, body)
        if dfid in self._explained or known:
            raise ValueError("not a rationale of this flow")
        self._explained.add(dfid)

    def _terms_of(self, store: Reader, dfid: str) -> Contract:
        found = store.row(
            "SELECT c.hash, c.body FROM decision_flows f JOIN contracts c ON c.hash = f.contract_hash WHERE f.dfid = ?",
            (dfid,),
        )
        if found is None:
            raise ValueError("no contract")
        if found[0] not in self._terms:
            self._terms[found[0]] = recorded_contract(found[1])
        return self._terms[found[0]]

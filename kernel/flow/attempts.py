"""The attempts of one flow: what was proposed, what was found about it, and what of that the model reads on its next try."""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.canonical import canonical
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import phrases
from sds.kernel.decision.dim import Verdict
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.bounds import MAGNITUDE_MAX
from sds.kernel.errors import ModelError, StoreError
from sds.kernel.storage.store import Reader, Store
from sds.kernel.storage.vault import ATTEMPT, Texts, key_for_flow

_REJECTED_SO_FAR = """
SELECT a.proposal, a.reasons FROM decision_flows f JOIN attempts a ON a.dfid = f.dfid
WHERE f.dfid = ? AND f.state = 'ACTIVE' ORDER BY a.attempt_number
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One proposal for one packet, and what was found about it. `report` is None unless it was accepted."""

    packet: DecisionPacket
    data: bytes
    decoding: Decoding
    verdict: Verdict
    report: JitReport | None = None
    number: int = 1
    now_ms: int = 0


def refuse_unkeepable(data: object, decoding: object) -> None:
    """Raise ModelError unless the record can keep what an engine returned: its proposal and what it measured.

    An engine is foreign: what nothing but the record objected to would leave the flow without an end.
    """
    if not isinstance(data, bytes) or not isinstance(decoding, Decoding):
        raise ModelError("the engine did not return bytes and what it measured")
    confidence = 0.0 if decoding.confidence is None else decoding.confidence
    counted = _number(decoding.tokens, int) and _number(decoding.passes, int)
    if not counted or not _number(confidence, float) or not _number(decoding.duration_ms, float):
        raise ModelError("the engine measured what is no number, or none of a size that can be kept")
    try:
        str.encode(decoding.model)
        canonical((decoding.alternatives, decoding.facts))
    except Exception as error:
        raise ModelError(f"the engine measured what cannot be kept: {type(error).__name__}") from error


def _number(value: object, kind: type[int | float]) -> bool:
    """Tell whether this is a number of a kind, whole ones included, and within the limits, which NaN is not."""
    return isinstance(value, (int, kind)) and -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX


def write_attempt(store: Store, attempt: Attempt) -> None:
    """Keep a rejected attempt; the flow goes on."""
    store.insert(
        "attempts",
        dfid=attempt.packet.dfid,
        attempt_number=attempt.number,
        proposal=key_for_flow(store, attempt.packet.dfid).seal(ATTEMPT, attempt.data),
        reasons=reasons_text(attempt.verdict),
        tokens=attempt.decoding.tokens,
        evaluated_at_ms=attempt.now_ms,
    )


def reasons_text(verdict: Verdict) -> str:
    """Return the reasons of a verdict as the record keeps them: canonical JSON of [gate, code, message]."""
    return canonical([[r.gate, r.code, r.message] for r in verdict.reasons]).decode()


def feedback(store: Reader, contract: Contract, dfid: str) -> str:
    """Return what an open flow has had rejected so far, as the model reads it; nothing once the flow has ended.

    Raises StoreError.
    """
    try:
        texts = Texts(store, dfid)
        attempts = [
            f"{phrases.claimed(contract, texts.data(ATTEMPT, sealed))} ({phrases.reason_codes(why)})"
            for sealed, why in store.rows(_REJECTED_SO_FAR, (dfid,))
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError("the attempts of this flow cannot be read", dfid=dfid) from error
    return f"Rejected before: {'; '.join(attempts)}" if attempts else ""


def rejected(store: Reader, dfid: str) -> tuple[frozenset[bytes], int]:
    """Return the proposals a flow has had rejected, and the tokens they took."""
    rows, texts = store.rows("SELECT proposal, tokens FROM attempts WHERE dfid = ?", (dfid,)), Texts(store, dfid)
    return frozenset(texts.data(ATTEMPT, row[0]) for row in rows), sum(row[1] for row in rows)

"""The service's promises under overload, and whether a run kept them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import linear_regression
from typing import Any

from sds.benchmarks.lib.measuring import summary
from sds.kernel.storage.store import Reader
from tests.load.offering import Outcome

SLOWER_MAX = 2.0  # p99 of admitted requests, over the p99 without load
REFUSED_MS_MAX = 20.0
MEMORY_MIB_MAX = 16.0  # growth from a quarter of the load to its end
DECIDED, REFUSED = 200, 503
LET_IN = (DECIDED, 409, 504)  # admitted; late: not decided (504), or decided and the order still on its way (409)
WANT_OF_A_TURN = ("QUEUE_FULL", "DEADLINE_EXCEEDED", "RESOURCE_CONTENTION", "MODEL_UNAVAILABLE")
_ESCALATED = (
    "SELECT v.reason_code FROM decision_flows f JOIN dim_validations v ON v.dfid = f.dfid WHERE f.state = 'ESCALATED'"
)


def escalated_for_a_turn(record: Reader) -> int:
    """Return how many cases were escalated because they got no turn in time."""
    return sum(code in WANT_OF_A_TURN for (code,) in record.rows(_ESCALATED))


def summed_up(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of requests, in milliseconds from the intended moment. Late requests count as admitted."""
    taken = [outcome.latency_ms for outcome in outcomes if outcome.status in LET_IN]
    decided = [outcome.latency_ms for outcome in outcomes if outcome.status == DECIDED]
    refused = [outcome.latency_ms for outcome in outcomes if outcome.status == REFUSED]
    return {
        "requests": len(outcomes),
        "answers": {str(status): n for status, n in sorted(Counter(outcome.status for outcome in outcomes).items())},
        "reason_codes": dict(Counter(outcome.reason_code for outcome in outcomes if outcome.status != DECIDED)),
        "states": dict(Counter(_state(outcome) for outcome in outcomes if outcome.status == DECIDED)),
        "accepted_ms": summary(taken) if taken else None,
        "decided_ms": summary(decided) if decided else None,
        "refused_ms": summary(refused) if refused else None,
        "lag_ms": summary([outcome.lag_ms for outcome in outcomes]) if outcomes else None,
    }


def _state(outcome: Outcome) -> str:
    return f"{outcome.state}: {outcome.reason_code}" if outcome.state == "ABORTED" else outcome.state


def weighed(mib: Sequence[float], seconds: float) -> dict[str, float]:
    """Return memory figures from samples at equal distances over `seconds`. The first quarter counts only in `most`."""
    begin, apart_min = len(mib) // 4, seconds / len(mib) / 60
    slope = linear_regression(range(len(mib) - begin), mib[begin:]).slope if len(mib) - begin > 1 else 0.0
    found = {"begin": mib[begin], "end": mib[-1], "most": max(mib), "grows_a_minute": slope / apart_min}
    return {name: round(value, 1) for name, value in found.items()}


def broken(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each broken promise; a run that shows nothing breaks one."""
    loaded, unloaded_ms = report["loaded"], report["unloaded_ms"]["p99"]
    lines = list(held(report))
    if loaded["accepted_ms"] and loaded["accepted_ms"]["p99"] > SLOWER_MAX * unloaded_ms:
        p99 = loaded["accepted_ms"]["p99"]
        lines.append(f"accepted: p99 {p99} ms, over {SLOWER_MAX:.0f} x the {unloaded_ms} ms of a service without load")
    if loaded["refused_ms"] and loaded["refused_ms"]["p99"] > REFUSED_MS_MAX:
        lines.append(f"refused: p99 {loaded['refused_ms']['p99']} ms, over {REFUSED_MS_MAX:.0f}")
    return [*lines, *grown(report["memory_mib"])]


def grown(memory_mib: Mapping[str, float]) -> list[str]:
    """Return a line where the service's memory grew by more than MEMORY_MIB_MAX after the first quarter of the load."""
    if memory_mib["end"] - memory_mib["begin"] <= MEMORY_MIB_MAX:
        return []
    return [f"memory grew from {memory_mib['begin']} to {memory_mib['end']} MiB"]


def held(report: Mapping[str, Any]) -> Iterable[str]:
    """Yield a line for each broken promise among those that hold on any machine, however slow or busy."""
    loaded = report["loaded"]
    if not loaded["accepted_ms"] or not loaded["refused_ms"]:
        yield "nothing was accepted, or nothing refused: this load shows nothing"
    if others := {status: n for status, n in loaded["answers"].items() if int(status) not in (*LET_IN, REFUSED)}:
        yield f"answers of another kind: {others}"
    if report["escalated_for_a_turn"]:
        yield f"{report['escalated_for_a_turn']} cases went to a human for want of a turn"
    if others := {agent: state for agent, state in report["agents"].items() if state != "ACTIVE"}:
        yield f"agents are not ACTIVE: {others}"

"""Findings from the declarations of a contract: fields that nothing reads, kinds that nobody may decide, missing
limits. With reads of real keys, also whether a state source has the declared fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations

from sds.kernel.contract.compiler import Path, faults, parse_type
from sds.kernel.contract.expressions import Checked
from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.state import Fields
from sds.lint.finding import Finding, Severity

TTL_MS_PLAUSIBLE = 1_000


def declared_findings(contract: Contract, places: Mapping[Path, Checked]) -> list[Finding]:
    """Return the findings of one contract. `places`: the evaluated expressions, by their place."""
    return [
        *_unused_fields(contract, places),
        *_shown_alike(contract),
        *_kinds(contract),
        *_reasons(contract),
        *_governance(contract),
        *_times(contract),
    ]


def _unused_fields(contract: Contract, places: Mapping[Path, Checked]) -> Iterator[Finding]:
    used = {path for checked in places.values() for path in checked.reads}
    used |= {path for path, _ in contract.show} or set(contract.snapshot)
    used |= set(contract.drift.fields)
    used |= {limit.per for limit in contract.spend if limit.per}
    used |= {path for kind in contract.kinds.values() for path in kind.draws}
    used |= policy_rules(contract).reads | {path for spec in contract.readings.values() for path in spec.score}
    for path in contract.snapshot:
        if path not in used:
            yield Finding(
                "field-unused",
                "warning",
                ("snapshot", path),
                f"`{path}` is not read by any rule, not shown to the model and not drawn from by any kind",
                "remove the field, unless a change of it must stop a decision: it is required and strict",
            )


def _shown_alike(contract: Contract) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for path, label in contract.show:
        other = first.setdefault(label, path)
        if other != path:
            message = f"`{path}` and `{other}` are both shown as `{label}`: the model cannot tell them apart"
            yield Finding("shown-alike", "warning", ("show", path), message, "give one of them another label")


def _kinds(contract: Contract) -> Iterator[Finding]:
    steps = {step for saga in contract.sagas.values() for step in saga.steps}
    others = {*contract.human.authority, *contract.human.kinds, *steps}
    for kind in contract.kinds:
        if kind not in contract.authority and kind != contract.refusal and kind not in others:
            message = f"`{kind}` is declared, but no agent, no human and no saga has the authority for it"
            yield Finding(
                "kind-without-authority",
                "warning",
                ("kinds", kind),
                message,
                "name the kind in `authority`, or remove it",
            )
    for one, message in _begun({*contract.authority, contract.refusal}):
        yield Finding("code-begins-another", "info", ("kinds", one), message)


def _begun(codes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each code with which another one begins, and what that means."""
    for one, other in permutations(sorted(set(codes)), 2):
        if other.startswith(one):
            yield one, f"`{other}` begins with `{one}`: to tell them apart, the model may need one more pass"


def _reasons(contract: Contract) -> Iterator[Finding]:
    for name, kind in contract.kinds.items():
        for index, code in enumerate(kind.reasons):
            at = ("kinds", name, "reasons", index)
            if code in kind.reasons[:index]:
                yield Finding(
                    "reason-repeated",
                    "warning",
                    at,
                    f"`{code}` is listed twice in the reasons of `{name}`",
                    "remove one",
                )
        for _, message in _begun(kind.reasons):
            yield Finding("code-begins-another", "info", ("kinds", name, "reasons"), message)


def _governance(contract: Contract) -> Iterator[Finding]:
    spending = [name for name in contract.authority if contract.kinds[name].spends]
    if spending and not contract.spend:
        message = f"`{spending[0]}` spends, but no limit says how much it may spend in an hour or a day"
        yield Finding("spend-unlimited", "warning", ("kinds", spending[0], "spends"), message, "add `spend`")
    for name in contract.authority:
        kind = contract.kinds[name]
        if kind.draws and not kind.spends and any(isinstance(drawn, str) for drawn in kind.draws.values()):
            message = f"`{name}` draws an amount that no spend limit counts"
            yield Finding("draw-not-spent", "warning", ("kinds", name, "draws"), message, "name the amount in `spends`")
    if "@" not in contract.owner:
        message = f"the owner `{contract.owner}` is not an address: nobody can be reached when the agent is suspended"
        yield Finding("owner-unreachable", "warning", ("owner",), message, "name a human, with an address")
    if contract.escalation.confidence_min_pct:
        message = "an engine that measures no confidence (any but `native`) escalates every decision"
        yield Finding("confidence-needed", "info", ("escalation", "confidence_min_pct"), message)
    for index, kind_name in enumerate(contract.escalation.always):
        if kind_name not in contract.authority and kind_name != contract.refusal:
            message = f"`{kind_name}` is in `always`, but the agent may not decide it in any case"
            yield Finding("always-without-authority", "warning", ("escalation", "always", index), message, "remove it")


def _times(contract: Contract) -> Iterator[Finding]:
    ttl_ms, age_ms_max = contract.budget.ttl_ms, contract.drift.age_ms_max
    if ttl_ms < TTL_MS_PLAUSIBLE:
        message = f"{ttl_ms} ms from trigger to proposal: a model on a busy CPU is slower, and every case escalates"
        yield Finding("ttl-too-short", "warning", ("budget", "ttl_ms"), message, f"set {TTL_MS_PLAUSIBLE} ms or more")
    if age_ms_max < min(ttl_ms, TTL_MS_PLAUSIBLE):
        message = (
            f"a snapshot may be {age_ms_max} ms old, but deciding may take {ttl_ms} ms: slow decisions always drift"
        )
        yield Finding(
            "age-shorter-than-decision", "warning", ("drift", "age_ms_max"), message, "raise it to `budget.ttl_ms`"
        )


def source_findings(contract: Contract, reads: Sequence[Fields]) -> list[Finding]:
    """Return what is missing or mistyped in these reads: an error if in all of them, else a warning."""
    if not reads:
        return [
            Finding(
                "source-unread",
                "warning",
                ("snapshot",),
                "the state source offers no key whose fields could be compared",
            )
        ]
    found = []
    for path, text in contract.snapshot.items():
        wrong = [words for fields in reads for words in faults((parse_type(path, text),), fields)]
        if wrong:
            message = f"{wrong[0]} in {len(wrong)} of {len(reads)} keys read from the source: those cases escalate"
            severity: Severity = "error" if len(wrong) == len(reads) else "warning"
            rule = "field-not-at-source" if all(path not in fields for fields in reads) else "field-unlike-source"
            hint = f"the source has: {', '.join(sorted(set().union(*reads)))[:300]}" if severity == "error" else ""
            found.append(Finding(rule, severity, ("snapshot", path), message, hint))
    return found

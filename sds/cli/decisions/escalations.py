"""`sds escalations`: list and show the cases that wait for a human, and resolve them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from sds.cli.common import GateOption, JsonFlag, OpenedGate, Reason, defined, open_store, operator, whole_dfid
from sds.cli.many import IdsFile, Report, for_each, ids_of
from sds.cli.render import Console, echo, number_range, plain, print_either, print_facts, print_json, shares
from sds.escalations import choices, decision_text, described, impacts, summary
from sds.gates.opening import preview_kernel, recovery_kernel
from sds.host.clock import now_ms
from sds.host.paths import gate_home
from sds.kernel.contract.compiler import parse_type, show
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE, KindBound, format_literal
from sds.kernel.errors import UsageError
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer, known_answer
from sds.kernel.human import cases
from sds.kernel.human.cases import Case, Decision
from sds.kernel.human.decisions import TAGS
from sds.kernel.human.review import CaseView, HumanReview, Resolution

Dfid = Annotated[str, typer.Argument(help="The flow's id, or its first characters.", metavar="DFID")]


def list_cases(
    gate: GateOption = "refund",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The maximum number of cases.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List the cases that wait for a human. Oldest first, each with time, dfid, event, reason, proposed decision and impact.

    Example: sds escalations list
    """
    with closing(open_store(gate)) as store:
        terms = cases.registered_terms(store, gate)
        waiting = cases.waiting(store, terms, limit=limit)
        count = cases.count_waiting(store, gate)
    facts = [summary(terms, case) for case in waiting]
    lines = [
        f"{of['since']}  {case.dfid}  {plain(case.event_id)}  {of['reason']}  {of['proposed'] or '-'}  {case.impact(terms) or '-'}"
        for case, of in zip(waiting, facts, strict=True)
    ]
    print_either(as_json, facts, lines or ["no cases wait for a human"])
    if len(waiting) == limit < count and not as_json:
        echo(f"only the oldest {limit} of {count} are listed: --limit lists more", err=True)
    if any(case.damaged for case in waiting) and not as_json:
        echo(f"damaged cases are shown incompletely: run sds ledger verify --gate {gate}", err=True)


def show_case(dfid: Dfid, gate: OpenedGate = "refund", as_json: JsonFlag = False) -> None:
    """Show one case. It shows the state then and now, the proposal, why it was not carried out, and what may be decided.

    Example: sds escalations show 550e8400
    """
    definition = defined(gate)
    open_store(definition.name).close()
    with preview_kernel(definition, gate_home(definition.name)) as kernel:
        at = HumanReview(kernel, now_ms=now_ms)
        case = at.case(whole_dfid(kernel.store, dfid))
        look = at.view(case)
    facts = described(at.contract, case, look) | {"commands": _commands(at.contract, case, look, definition.option)}
    if as_json:
        print_json(facts)
    else:
        _print(at.contract, case, look, facts)


def _commands(terms: Contract, case: Case, look: CaseView, gate: str) -> list[str]:
    """Return the commands that a human may type now, likeliest first, with numbers at their lower bounds."""
    start, why = f"sds escalations resolve {case.dfid}{gate}", '--reason "..."'
    seen = f" --seen {look.seen}" if look.moved else ""
    lines = {
        "OVERRIDE": f"--override {why}{seen}",
        "MODIFY": f"--modify {{}} {why}{seen}",
        "RETURN": f"--return {why}",
        "ABORT": f"--abort {why}",
        "SETTLED": f"--settled REFERENCE {why}",
        "REJECTED": f"--rejected {why}",
    }
    return [
        f"{start} {lines[each.decision].replace('{}', shlex.quote(each.example()), 1)}"
        + (" --acknowledge" if each.acknowledge else "")
        for each in choices(terms, case, look)
    ]


def _print(terms: Contract, case: Case, look: CaseView, facts: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{case.dfid}  {plain(case.event_id)}  {case.resolved or case.state}, since {facts['since']}")
    for line in ["an order was sent, and its outcome is unknown"] if case.unknown else case.reasons:
        console.print(f"  {plain(line)}")
    print_facts(console, "event", case.trigger)
    print_facts(
        console, f"state, as the agent read it ({case.snapshot_id[:12] or 'never'}), and now", _state(terms, case, look)
    )
    console.print(f"  now: {look.seen}")
    for note in look.packet.notes:
        console.print(f"  note: {plain(note)}")
    proposal = {"decision": facts["proposed"] or "none", "impact": facts["impact"] or "-"}
    proposal |= {"confidence": f"{case.confidence:.3f}"} if case.confidence is not None else {}
    for choice in case.alternatives:
        proposal[str(choice.get("choice"))] = shares(choice.get("probabilities", {}))
    print_facts(console, "ordered" if case.ordered else "proposed", proposal)
    if facts["commands"]:
        kinds = look.packet.envelope.kinds if case.can_be_carried_out else ()
        decidable = {kind.kind: _bounds(terms, kind) for kind in kinds if kind.kind != ESCALATE}
        print_facts(console, "a human may decide now", decidable)
        console.print("type one of these commands")
    for command in facts["commands"]:
        console.print(f"  {command}")


def _state(terms: Contract, case: Case, look: CaseView) -> dict[str, str]:
    then, now, shown = case.fields, look.packet.snapshot.fields, {}
    for path, declared in terms.snapshot.items():
        spec = parse_type(path, declared)
        old, new = (show(spec, fields[path]) if path in fields else "-" for fields in (then, now))
        mark = "  (moved)" if path in look.moved else ""
        shown[path] = old if old == new else f"{old} -> {new}{mark}"
    return shown


def _bounds(terms: Contract, kind: KindBound) -> str:
    numbers = [number_range(name, bound) for name, bound in kind.params]
    numbers += [f"{name} {format_literal(value, scale)}" for name, value, scale in kind.fills]
    levels = " to ".join(dict.fromkeys(impacts(terms, kind)))
    return "; ".join([*numbers, f"{levels} impact", f"reasons {', '.join(kind.reasons)}"])


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """What a human decided about a case, in words that were typed."""

    override: Annotated[bool, typer.Option("--override", help="Carry out what the agent proposed.")] = False
    modify: Annotated[
        str | None, typer.Option("--modify", metavar="JSON", help="Decide this instead, in the form `show` prints.")
    ] = None
    return_: Annotated[
        bool, typer.Option("--return", help="Return the case to the agent. Its event may be decided again.")
    ] = False
    abort: Annotated[bool, typer.Option("--abort", help="End the case. Nothing is carried out.")] = False
    settled: Annotated[
        str | None, typer.Option("--settled", metavar="REFERENCE", help="The UNKNOWN order was settled under this id.")
    ] = None
    rejected: Annotated[bool, typer.Option("--rejected", help="The UNKNOWN order was not carried out.")] = False
    seen: Annotated[str, typer.Option("--seen", metavar="ID", help="The state you saw: `now` of `show`.")] = ""
    acknowledge: Annotated[
        bool, typer.Option("--acknowledge", help="Accept an impact that is HIGH and cannot be undone.")
    ] = False

    def decision(self, dfid: str) -> Decision:
        """Return the only decision that was given about a case. Raises UsageError where none or two were."""
        given: dict[Decision, bool] = {
            "OVERRIDE": self.override,
            "MODIFY": self.modify is not None,
            "RETURN": self.return_,
            "ABORT": self.abort,
            "SETTLED": self.settled is not None,
            "REJECTED": self.rejected,
        }
        wanted = [name for name, is_given in given.items() if is_given]
        if len(wanted) != 1:
            names = ", ".join(f"--{name.lower()}" for name in given)
            raise UsageError(f"give exactly one of {names}", hint=f"sds escalations show {dfid}")
        return wanted[0]

    def of_several(self, decision: Decision) -> None:
        """Raise UsageError for what is decided of one case alone: what is carried out, and on which state it was decided."""
        if decision not in TAGS or self.seen:
            what = "seen" if decision in TAGS else decision.lower()
            raise UsageError(f"--{what} is for one case", hint="only --return and --abort resolve several cases")

    def decided(self, dfid: str, reason: str) -> Resolution:
        given = self.modify or "", self.seen, self.acknowledge, self.settled or ""
        return Resolution(self.decision(dfid), operator(), reason, *given)


def resolve(
    reason: Reason,
    dfid: Annotated[
        list[str] | None, typer.Argument(help="The flow's id, or its first characters.", metavar="DFID")
    ] = None,
    options: ResolveOptions = ResolveOptions(),
    file: IdsFile = None,
    gate: OpenedGate = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Resolve a case, once. Give exactly one of --override, --modify, --return, --abort, --settled and --rejected.

    With --return and --abort several cases may be given. Each is resolved by itself and has a line of its own.

    Example: sds escalations resolve 550e8400 --abort --reason "the customer withdrew"
    """
    dfids = ids_of(dfid, file, "DFID")
    wanted = options.decided(shlex.quote(dfids[0]), reason)
    several = file is not None or len(dfids) > 1
    if several:
        options.of_several(wanted.decision)
    definition = defined(gate)
    open_store(definition.name).close()
    sends = wanted.decision not in TAGS
    with recovery_kernel(definition, gate_home(definition.name), sends=sends) as kernel:
        if several:
            for_each(dfids, lambda each: _resolved(kernel, each, wanted), as_json=as_json)
            return
        answer = _resolve(kernel, whole_dfid(kernel.store, dfids[0]), wanted)
        terms = human_contract(kernel.contract)
    print_either(as_json, asdict(answer), _lines(terms, answer, wanted.decision, definition.option))


def _resolve(kernel: Kernel, dfid: str, decided: Resolution) -> Answer:
    return HumanReview(kernel, now_ms=now_ms, log=kernel.log).resolve(dfid, decided)


def _resolved(kernel: Kernel, given: str, decided: Resolution) -> Report:
    """Resolve one case of several. One that was resolved in this way before, as by a call that was stopped, is no failure."""
    dfid = whole_dfid(kernel.store, given)
    already = ""
    try:
        answer = _resolve(kernel, dfid, decided)
    except UsageError as error:
        if error.reason_code != "FLOW_CLOSED":
            raise
        answer = known_answer(kernel.store, dfid)
        if answer.resolution != decided.decision:
            raise
        already = f"already, by {answer.resolved_by}"
    parts = (answer.dfid, plain(answer.event_id), answer.state, decided.decision, already)
    return asdict(answer) | {"already": bool(already)}, "  ".join(part for part in parts if part)


def _lines(terms: Contract, answer: Answer, wanted: Decision, gate: str) -> Iterator[str]:
    done = decision_text(terms, answer.action, answer.params) if answer.action else "-"
    done = "nothing is carried out" if wanted in TAGS else done
    became = " ".join(part for part in (answer.execution, answer.reference) if part)
    yield "  ".join(part for part in (answer.dfid, answer.state, wanted, done, became) if part)
    if answer.execution == "UNKNOWN":
        yield f"the outcome of the order is still unknown: run sds recover{gate}"
    elif wanted in ("SETTLED", "REJECTED") and (answer.execution == "SUCCESS") != (wanted == "SETTLED"):
        yield "the executor gave a different answer, and the record keeps the executor's answer"

"""`sds contracts`: check a contract, compare two versions, register one, and list a record's versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from sds.cli.common import (
    GateOption,
    GgufPath,
    JsonFlag,
    Reason,
    as_name,
    defined,
    existing,
    named_model,
    open_store,
    operator,
)
from sds.cli.render import echo, plain, print_either
from sds.definitions.registry import find
from sds.gates.opening import sample_reads
from sds.host.clock import now_ms, when
from sds.host.input_files import read_text
from sds.host.paths import gate_home, make_private, open_record
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, Lines, load_with_lines
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import ContractError, UsageError
from sds.kernel.registry import registry
from sds.kernel.registry.contract_versions import Version, registered_contract, versions
from sds.lint.declared import source_findings
from sds.lint.diff import ContractDiff, diff
from sds.lint.finding import SEVERITIES, Finding, counted, in_words, sorted_findings
from sds.lint.lint import Report, lint

SEED = 1  # of the search for snapshots, so that equal files give equal answers
READS_MAX = 200
_SIGNS = {"wider": "+", "narrower": "-", "different": "~"}


def contract_file(given: Path) -> Path:
    """Return a contract's file: the given one, or that of the gate at this path. Raises UsageError."""
    if not given.is_dir() and given.suffix != ".py":
        return given
    gate = find(given)
    if isinstance(gate.contract, Path):
        return gate.contract
    raise UsageError(f"the contract of gate `{gate.name}` has no file of its own", hint="name a YAML file")


ContractFile = Annotated[
    Path,
    typer.Argument(
        help="The contract's YAML file, or the path of a gate that has one.", metavar="FILE", callback=contract_file
    ),
]
OldContract = Annotated[Path, typer.Argument(help="The old contract.", metavar="A", callback=contract_file)]
NewContract = Annotated[Path, typer.Argument(help="The new contract.", metavar="B", callback=contract_file)]


def check(
    file: ContractFile,
    source: Annotated[str | None, typer.Option("--source", help="Compare the fields with this gate's state.")] = None,
    model: GgufPath = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a contract for likely mistakes. It reports what its author may not have meant. Exit code 1: an error.

    Example: sds contracts check contract.yaml --source refund --strict
    """
    contract, lines = _load(file)
    report = _checked(contract)
    reads = _real_reads(source) if source else None
    findings = [*report.findings, *(source_findings(contract, reads) if reads is not None else ())]
    findings = sorted_findings([*findings, *_said_by(contract, report, model)], lines)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    data = [finding.as_data(lines) for finding in findings]
    summary = ", ".join(counted(count, severity) for severity, count in counts.items() if count) or "no findings"
    print_either(
        as_json,
        {"file": str(file), "findings": data, "counts": counts, "snapshots": report.snapshots},
        [*(_finding_line(file, each, lines) for each in findings), f"{summary} ({report.snapshots} snapshots tried)"],
    )
    if counts["error"] or (strict and counts["warning"]):
        raise typer.Exit(1)


def compare(
    a: OldContract,
    b: NewContract,
    gate: Annotated[str | None, typer.Option("--gate", help="Also try this gate's state.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare the decisions of two contracts. It shows those that become possible or impossible, each with a snapshot.

    Example: sds contracts diff contract.yaml contract-new.yaml --gate refund
    """
    before, after = load_contract(a), load_contract(b)
    if gate is not None:
        _refuse_other_gate(after, as_name(gate))
    changes = diff(before, after, _rng(), real=_real_reads(gate) if gate else ())
    print_either(as_json, _diff_data(changes), _diff_lines(changes))


def register(
    file: ContractFile,
    reason: Reason,
    gate: Annotated[str | None, typer.Option("--gate", help="The gate that it must be for. Default: any.")] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", help="The SHA-256 that the file must have.")] = None,
    acknowledge: Annotated[
        bool, typer.Option("--acknowledge", help="Accept that it permits more than before.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put a contract in force in its gate's record. A contract with errors is refused in any case.

    A contract that permits more than the registered one needs --acknowledge.

    Example: sds contracts register contract.yaml --reason "vouchers up to 200" --acknowledge
    """
    registry.reason_given(reason)
    contract, _ = _load(file, sha256)
    if gate is not None:
        _refuse_other_gate(contract, as_name(gate))
    _refuse_errors(file, contract)
    folder = gate_home(contract.gate)
    make_private(folder)
    with closing(open_record(folder)) as store:
        known = registered_contract(store, contract.gate)
        delta = diff(known, contract, _rng()) if known else None
        if delta is not None and not as_json:
            echo("\n".join(map(plain, _diff_lines(delta))))
        if delta is not None and delta.more and not acknowledge:
            if refused := registry.refusal(store, contract, now_ms=now_ms()):  # then --acknowledge would not help
                raise ContractError(refused.message, hint=refused.hint)
            message = f"the contract permits more than the registered version `{known.version if known else ''}`"
            raise UsageError(f"{message}: {', '.join(delta.more)}", hint="read the difference, then add --acknowledge")
        registry.register(store, contract, by="operator", now_ms=now_ms(), who=operator(), reason=reason)
    facts = {"gate": contract.gate, "version": contract.version, "contract_hash": contract.hash}
    line = f"{contract.gate}: version {contract.version} is in force ({contract.hash[:12]})"
    lines = [line, f"before {contract.effective_from} (UTC) every case goes to a human"]
    begun = when(now_ms(), "seconds") >= contract.effective_from
    print_either(as_json, {**facts, "diff": _diff_data(delta) if delta else None}, lines[:1] if begun else lines)


def list_contracts(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List a record's contract versions. Each line says if it is in force, superseded or revoked, who registered it and why.

    Example: sds contracts list --gate refund
    """
    with closing(open_store(gate)) as store:
        listed = versions(store)
    print_either(as_json, [asdict(version) for version in listed], map(_version_line, listed))


def _version_line(of: Version) -> str:
    at, why = when(of.registered_at_ms, "seconds"), ": ".join(word for word in (of.who, of.reason) if word)
    return f"{of.version}  {of.standing}  {of.contract_hash[:12]}  {of.agent_id}  {at}  {why}"


def _rng() -> Random:
    return Random(SEED)  # noqa: S311  a search, not a secret


def _load(file: Path, checksum: str | None = None) -> tuple[Contract, Lines]:
    """Return a contract that may be registered, and the line of each of its fields. Raises ContractError."""
    contract = load_contract(file, checksum=checksum)
    return contract, load_with_lines(read_text(file, FILE_BYTES_MAX), str(file))[1]


def _checked(contract: Contract) -> Report:
    from sds.lint.language import language_findings  # noqa: PLC0415  imports numpy

    report = lint(contract, _rng())
    said = language_findings(contract, report.reached)
    return Report((*report.findings, *said), report.snapshots, report.reached)


def _said_by(contract: Contract, report: Report, model: Path | None) -> list[Finding]:
    """Return the findings of a model's tokenizer; without an installed model, one finding that none was asked."""
    from sds.lint.language import model_findings  # noqa: PLC0415
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415
    from sds.models.llamacpp.backend import LlamaBackend  # noqa: PLC0415
    from sds.models.protocol import BackendError  # noqa: PLC0415

    if model is not None:
        with named_model(existing(model)), closing(LlamaBackend(model, threads=1)) as backend:
            return model_findings(contract, report.reached, backend)
    try:
        with closing(LlamaBackend(embedded_model(), threads=1)) as backend:
            return model_findings(contract, report.reached, backend)
    except BackendError as error:
        return [
            Finding(
                "model-not-asked",
                "info",
                (),
                f"the contract was not checked against a model's vocabulary: {error}",
                error.hint,
            )
        ]


def _refuse_errors(file: Path, contract: Contract) -> None:
    report = _checked(contract)
    found = [*report.findings, *_said_by(contract, report, None)]
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        hint = f"sds contracts check {file}"
        raise ContractError(f"the contract has {counted(len(errors), 'error')}: {errors[0].message}", hint=hint)


def _refuse_other_gate(contract: Contract, gate: str) -> None:
    if gate != contract.gate:
        hint = "name its own gate, or another file"
        raise UsageError(f"the contract is for gate `{contract.gate}`, not for `{gate}`", hint=hint)


def _real_reads(gate: str) -> list[Fields]:
    found = defined(gate)
    return sample_reads(found, gate_home(found.name), READS_MAX)


def _finding_line(file: Path, finding: Finding, lines: Lines) -> str:
    mend = f"; {finding.hint}" if finding.hint else ""
    return f"{file}:{finding.line(lines)}: {finding.severity}: {finding.message}{mend}"


def _diff_lines(found: ContractDiff) -> Iterator[str]:
    for change in found.decisions:
        who = "" if change.who == "agent" else f"{change.who}: "
        yield f"{_SIGNS[change.direction]} {who}{change.kind} {change.aspect}: {change.before} -> {change.after}"
        yield f"    when {in_words(change.example)} ({change.snapshots} snapshots)"
    for setting in found.settings:
        before, after = setting.before or "nothing", setting.after or "nothing"
        yield f"{_SIGNS[setting.direction]} {setting.path}: {before} -> {after}"
    yield found.verdict


def _diff_data(found: ContractDiff) -> dict[str, Any]:
    return {**asdict(found), "more": list(found.more), "verdict": found.verdict}

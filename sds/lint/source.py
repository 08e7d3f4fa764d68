"""Whether a state source has what a contract declares: fields and types of some of its real keys."""

from __future__ import annotations

from collections.abc import Sequence

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.snapshot import faults, parse_type
from sds.kernel.envelope.state import Fields
from sds.lint.finding import Finding, Severity


def source_findings(contract: Contract, reads: Sequence[Fields]) -> list[Finding]:
    """Return what is missing or mistyped in these reads: an error if in all of them, else a warning."""
    if not reads:
        return [Finding("source-unread", "warning", ("snapshot",), "the source has no key to compare the fields with")]
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

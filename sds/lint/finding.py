"""A finding of a contract check: severity, place, message and hint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sds.kernel.contract.yaml_lines import Lines, Path
from sds.kernel.envelope.state import Fields

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `error`: the contract cannot do what it says; `info`: worth knowing, nothing to correct.

    `rule` names the check for machines, `path` the place in the contract, `example` a snapshot that shows it.
    """

    rule: str
    severity: Severity
    path: Path
    message: str
    hint: str = ""
    example: Fields | None = None

    def line(self, lines: Lines) -> int:
        """Return the line of `path`, or of the nearest enclosing place that is written out."""
        where = self.path
        while where and where not in lines:
            where = where[:-1]
        return lines.get(where, 1)

    def as_data(self, lines: Lines) -> dict[str, object]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "line": self.line(lines),
            "path": ".".join(map(str, self.path)),
            "message": self.message,
            "hint": self.hint,
            "example": dict(self.example) if self.example is not None else None,
        }


def in_words(fields: Fields) -> str:
    """Return fields of a snapshot in one line, in the units of expressions."""
    return ", ".join(f"{path}={json.dumps(value)}" for path, value in sorted(fields.items())) or "anything"


def counted(count: int, severity: Severity) -> str:
    return f"{count} {severity}{'s' if count > 1 and severity != 'info' else ''}"


def sorted_findings(found: Iterable[Finding], lines: Lines) -> list[Finding]:
    return sorted(found, key=lambda f: (f.line(lines), SEVERITIES.index(f.severity), f.rule, f.message))

"""The form in which a contract is hashed and recorded. Every version of this program writes a contract in the same form.

The fields named in `ALWAYS` are those of the first version of this form: they are written whether a contract gives them or
not. Every other field, of a contract or of a section in it, came later: it is written only where it differs from its
default. So a field that a contract leaves out does not change its hash, and an older program that does not know the field
can read the contract. The default of a later field must therefore never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

_ALWAYS = {
    "EventSpec": "id key evidence evidence_chars_max",
    "ParamSpec": "lo hi scale step residue",
    "FillSpec": "value scale",
    "KindSpec": "reasons when params fills draws spends impact",
    "DriftSpec": "abs pct",
    "DriftPolicy": "age_ms_max fields",
    "SpendLimit": "name window max_minor per",
    "EscalationSpec": "confidence_min_pct always per_hour impact_high_minor pauses_agent",
    "HumanSpec": "authority when kinds",
    "MemorySpec": "entries_max tokens_max days_max scope",
    "ArtifactSpec": "names tokens_max",
    "SagaSpec": "steps compensation",
    "RetrySpec": "attempts_max restarts_max rejections_to_suspend",
    "BudgetSpec": "tokens_max ttl_ms dispatch_ms_max",
    "AggregateThresholds": "window paid_pct_max paid_mean_minor_max",
    "RationaleSpec": "order chars_max",
    "Contract": (
        "gate agent_id version owner effective_from proposal_schema role mission source authority event snapshot show"
        " levels when kinds rationale draws_settle_in drift spend escalation human memory artifacts sagas retry budget"
        " aggregate_thresholds"
    ),
}
ALWAYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {section: frozenset(fields.split()) for section, fields in _ALWAYS.items()}
)


class Section(BaseModel):
    """A contract, or a section of one: frozen, without undeclared fields, and written in the form described above."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = self._left_out()
        return {name: value for name, value in write(self).items() if name not in left_out}

    def _left_out(self) -> set[str]:
        always = ALWAYS.get(type(self).__name__, frozenset())
        later = {name: field for name, field in type(self).model_fields.items() if name not in always}
        return {
            name for name, field in later.items() if getattr(self, name) == field.get_default(call_default_factory=True)
        }

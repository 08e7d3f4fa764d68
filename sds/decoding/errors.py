"""Reason codes of the decoder."""

from __future__ import annotations

from sds.kernel.errors import ModelError

BACKEND_FAILED = "BACKEND_FAILED"
CHOICE_TOO_CLOSE = "CHOICE_TOO_CLOSE"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
LANGUAGE_FAILED = "MASK_FAILED"
LOGITS_INVALID = "LOGITS_INVALID"
TOKEN_BUDGET_EXCEEDED = "TOKEN_BUDGET_EXCEEDED"  # noqa: S105 - a reason code, not a secret


def ambiguous(choice: str) -> ModelError:
    return ModelError(
        f"the two likeliest options of `{choice}` are closer than the model's noise", reason_code=CHOICE_TOO_CLOSE
    )

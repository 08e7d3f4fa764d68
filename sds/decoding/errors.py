"""Reason codes of the decoder, and the checks that raise them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sds.kernel.errors import ModelError, SdsError
from sds.models.protocol import ENDINGS, BackendError

BACKEND_FAILED = "BACKEND_FAILED"
CHOICE_TOO_CLOSE = "CHOICE_TOO_CLOSE"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
LANGUAGE_FAILED = "MASK_FAILED"
LOGITS_INVALID = "LOGITS_INVALID"
TOKEN_BUDGET_EXCEEDED = "TOKEN_BUDGET_EXCEEDED"  # noqa: S105 - a reason code, not a secret


@contextmanager
def as_model_error(reason_code: str, what: str) -> Iterator[None]:
    """Turn every exception of the block into a `ModelError` with this reason code. `what`: the failing part, for the message.

    A ModelError and the exceptions that end the process pass unchanged.
    """
    try:
        yield
    except (ModelError, *ENDINGS):
        raise
    except (SdsError, BackendError) as error:
        raise ModelError(str(error), reason_code=reason_code, hint=error.hint) from error
    except BaseException as error:
        raise ModelError(f"{what} failed unexpectedly", reason_code=reason_code) from error


def check_tokens(tokens: int, tokens_max: int) -> None:
    if tokens > tokens_max:
        raise ModelError(f"the decision needs more than {tokens_max} tokens", reason_code=TOKEN_BUDGET_EXCEEDED)


def ambiguous(choice: str) -> ModelError:
    return ModelError(
        f"the two likeliest options of `{choice}` are closer than the model's noise", reason_code=CHOICE_TOO_CLOSE
    )

"""docs/errors.md is the list of reason codes; no code is raised that is not in it, and none is in it that is not raised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sds.kernel import errors
from sds.kernel.errors import EventError, SdsError, StoreError, UsageError, WorldError, unreadable
from sds.service.problems import of_error, response_of
from sds.service.reasons import REASONS, code_of, page
from tests.service.testbed import Bed

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_list_says() -> None:
    """Written by `python -m sds.service.reasons > docs/errors.md`."""
    assert page() == (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_the_service_shows_the_page_where_a_problems_type_points(bed: Bed) -> None:
    problem = bed.client.get("/v2").json()
    path, _, code = problem["type"].partition("#")
    assert f"## {code}\n" in bed.client.get(path, headers={"Authorization": ""}).text


def test_every_code_of_the_list_is_raised_somewhere_and_no_other() -> None:
    ours, kernel = sources("sds/service"), sources("sds", "kernel")
    raised = set(re.findall(r'Problem\(\s*"([A-Z_]+)"', ours))
    assert set() == raised - set(REASONS)
    named = set(re.findall(r'"([A-Z_]+)"', ours.replace((ROOT / "sds/service/reasons.py").read_text("utf-8"), "")))
    by_errors = set(re.findall(r'reason_code(?:: str)? = "([A-Z_]+)"|reason_code="([A-Z_]+)"', kernel))
    known = {code for pair in by_errors for code in pair if code}
    made_of_others = {"CONFLICT", "NOT_DECIDED"}  # `reasons.code_of` says of which
    assert set() == set(REASONS) - raised - named - known - made_of_others


def sources(*folders: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EventError("x"), 400, "EVENT_INVALID"),
        (UsageError("x", reason_code="NEVER_HEARD_OF"), 400, "USAGE"),
        (WorldError("x", reason_code="NEVER_HEARD_OF"), 503, "UNAVAILABLE"),
        (WorldError("x", reason_code="DEADLINE_EXCEEDED"), 504, "NOT_DECIDED"),
        (errors.TransitionError("x"), 409, "CONFLICT"),
        (errors.ErasedError("x"), 410, "ERASED"),
        (SdsError("x"), 500, "INTERNAL"),
    ],
)
def test_every_error_of_ours_has_its_place(error: SdsError, status: int, code: str) -> None:
    assert (code, status) == (code_of(error), of_error(error).status)


def test_what_can_never_succeed_is_not_called_retryable() -> None:
    assert of_error(StoreError("x")).retryable
    assert not of_error(unreadable("d")).retryable
    assert "retry-after" not in response_of(of_error(unreadable("d"))).headers


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("sds flows", REASONS["USAGE"].hint),
        ("say so with --reason", REASONS["USAGE"].hint),
        ("end it with --abort", "end it with ABORT"),
        (
            "decide on it with --modify; look again: sds escalations show 01",
            "decide on it with MODIFY; look again: GET /v1/escalations/01",
        ),
        (
            "if that is what you want, repeat it with --acknowledge",
            "if that is what you want, repeat it with `acknowledge`: true",
        ),
    ],
)
def test_who_asks_over_http_is_told_no_command(hint: str, told: str) -> None:
    assert told == json.loads(bytes(response_of(of_error(UsageError("x", hint=hint))).body))["hint"]
    assert "sds doctor" == of_error(StoreError("x", hint="sds doctor")).hint  # that is for who runs the service


def test_what_is_told_of_an_error_is_one_line() -> None:
    told = response_of(of_error(StoreError("a\nb\x00", hint="c\r\nd")))
    assert b"\\n" not in bytes(told.body)
    assert b"\\u0000" not in bytes(told.body)

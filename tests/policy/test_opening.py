"""A policy that cannot be opened leaves nothing open."""

from __future__ import annotations

import gc

import onnxruntime
import pytest

from sds.engines.protocol import Engine
from sds.kernel.errors import ModelError, UsageError
from sds.policy.opening import open_policy
from tests.kernel import world
from tests.policy.conftest import CODE, Judge, contract_of

SCORE = "  risk: {question: 'Should it be feared?', score: [car.open_minor]}\npolicy:\n"
MOOD = "  mood: {question: 'Which mood?', values: {calm: it is calm, angry: it is not}}\npolicy:\n"


def sessions() -> int:
    gc.collect()
    return sum(isinstance(each, onnxruntime.InferenceSession) for each in gc.get_objects())


def no_model() -> Engine:
    raise ModelError("there is no model")


@pytest.mark.parametrize(("reading", "why"), [(SCORE, UsageError), (MOOD, ModelError)])
def test_readers_are_closed_where_another_reading_cannot_be_read(
    reading: str, why: type[Exception], judgement: Judge
) -> None:
    terms = contract_of(CODE.replace("policy:\n", reading, 1))
    folder, before = judgement(terms), sessions()
    with pytest.raises(why) as refused:  # which keeps the frames, and what they hold, alive
        open_policy(terms, folder, open_model=no_model, now_ms=lambda: world.NOW_MS)
    assert refused.tb is not None
    assert before == sessions()

"""What holds for every kind of engine that a file can name: proved first, no failure swallowed, ESCALATE in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from sds.decoding.errors import DEADLINE_EXCEEDED
from sds.engines.config import EngineSpec, Kind, open_engine_of
from sds.engines.native import NativeEngine
from sds.engines.protocol import Engine
from sds.grammars.tokens.matcher import TokenMatcher
from sds.kernel.errors import ModelError
from sds.kernel.flow.states import Answer
from sds.models.text.outlines import Guard, OutlinesWriter
from sds.models.text.servers import FORMS
from tests.engines.conftest import decide, running_ms
from tests.engines.servers import completion, free_port, hang, misbehaving, reply
from tests.engines.test_outlines import Idle
from tests.kernel.durable import World, contract

pytestmark = pytest.mark.usefixtures("libraries_imported")

LOCAL: tuple[tuple[Kind, str], ...] = (
    ("native", "llamacpp"),
    ("native", "transformers"),
    ("native", "openvino"),
    ("outlines", "llamacpp"),
    ("outlines", "transformers"),
)
DEADLINE_MS = 700
PASS_S = 0.9  # of which one is begun in time
GRACE_MS = 1500  # one pass is never cut short; and a busy machine
Spec = Callable[[Kind, str], EngineSpec]


@pytest.fixture(scope="module")
def spec_of(tiny_path: Callable[[int], Path], tiny_folder: Callable[[int], Path]) -> Spec:
    def make(kind: Kind, library: str) -> EngineSpec:
        if library == "openvino":
            pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
        model = tiny_folder(1) if library == "transformers" else tiny_path(1)
        return EngineSpec(
            name="here",
            kind=kind,
            model=str(model),
            library=library,
            dtype="fp32" if library == "openvino" else None,
            backend="llguidance" if kind == "outlines" else None,
        )

    return make


@pytest.fixture(scope="module")
def local(spec_of: Spec) -> Iterator[Callable[[Kind, str], Engine]]:
    """Open each local engine once."""
    opened: dict[tuple[Kind, str], Engine] = {}
    with ExitStack() as stack:

        def open_one(kind: Kind, library: str) -> Engine:
            if (kind, library) not in opened:
                opened[kind, library] = open_engine_of(spec_of(kind, library), now_ms=running_ms)
                stack.callback(opened[kind, library].close)
            return opened[kind, library]

        yield open_one


def served(kind: Kind, url: str) -> EngineSpec:
    return EngineSpec(name="box", kind=kind, url=url, model="m", timeout_ms=DEADLINE_MS)


def test_every_kind_is_tried_here() -> None:
    assert set(get_args(Kind)) == {kind for kind, _ in LOCAL} | set(FORMS)


@pytest.mark.parametrize(("kind", "library"), LOCAL)
def test_a_local_engine_whose_mask_is_dead_does_not_open(
    kind: Kind, library: str, spec_of: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closings(monkeypatch)
    if kind == "native":
        monkeypatch.setattr(TokenMatcher, "accept", lambda _matcher, _token: None)
    else:
        monkeypatch.setattr(OutlinesWriter, "_compiled", lambda _self, _grammar: Idle())
    with pytest.raises(ModelError) as refused:
        open_engine_of(spec_of(kind, library), now_ms=running_ms)
    assert "MASK_FAILED" == refused.value.reason_code
    assert 1 == len(closed), "what nobody drives is let go of"


def closings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by each model that is closed."""
    from sds.models.cache.prefix_cache import SlotBackend
    from sds.models.text.outlines import DrivenLlama

    closed: list[object] = []

    def counted(sound: Callable[[Any], None]) -> Callable[[Any], None]:
        def close(self: object) -> None:
            closed.append(self)
            sound(self)

        return close

    for owner in (SlotBackend, DrivenLlama):
        monkeypatch.setattr(owner, "close", counted(owner.close))
    return closed


@pytest.mark.parametrize("kind", FORMS)
def test_a_server_that_says_what_it_likes_does_not_open(kind: Kind) -> None:
    def chat(connection: socket.socket, _request: bytes) -> None:
        text = "Of course, I will pay!"
        reply(connection, f'{{"generated_text": "{text}"}}'.encode() if kind == "tgi" else completion(text))

    with misbehaving(chat) as (url, requests):
        with pytest.raises(ModelError, match="the engine `box` does not constrain its model") as refused:
            open_engine_of(served(kind, url), now_ms=running_ms)
        assert ("MASK_FAILED", 1) == (refused.value.reason_code, len(requests))


@pytest.mark.parametrize("kind", FORMS)
def test_a_server_that_is_dead_or_hangs_does_not_open_and_takes_no_longer_than_it_may(kind: Kind) -> None:
    with misbehaving(hang) as (hanging, _):
        for url in (f"http://127.0.0.1:{free_port()}/v1", hanging):
            took_ms = (_until_refused_ms(kind, url) for _ in range(10))
            assert any(each < DEADLINE_MS + GRACE_MS for each in took_ms)  # a busy machine may be late now and then


def _until_refused_ms(kind: Kind, url: str) -> float:
    began = time.monotonic()
    with pytest.raises(ModelError, match="box: the server "):
        open_engine_of(served(kind, url), now_ms=running_ms)
    return (time.monotonic() - began) * 1000


def timed(folder: Path, engine: Engine) -> tuple[float, Answer]:
    world = World(folder, terms=contract(("ttl_ms: 30000", f"ttl_ms: {DEADLINE_MS}")))
    world.clock = running_ms  # type: ignore[assignment]  # a clock that nobody moves
    world.kernel = world.open_kernel()
    began = time.monotonic()
    answer = decide(world, engine)
    took_ms = (time.monotonic() - began) * 1000
    world.close()
    return took_ms, answer


@pytest.mark.parametrize(("kind", "library"), LOCAL)
def test_a_slow_local_model_escalates_within_the_deadline_and_one_pass(
    kind: Kind, library: str, local: Callable[[Kind, str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = local(kind, library)
    owner, name = (engine._backend, "run") if isinstance(engine, NativeEngine) else (Guard, "_masked")
    sound = getattr(owner, name)

    def slow(*arguments: object) -> object:
        time.sleep(PASS_S)
        return sound(*arguments)

    monkeypatch.setattr(owner, name, slow)
    for number in range(10):  # a busy machine may be late now and then
        (tmp_path / str(number)).mkdir()
        took_ms, answer = timed(tmp_path / str(number), engine)
        assert ("ESCALATED", DEADLINE_EXCEEDED, None) == (answer.state, answer.reason_code, answer.execution)
        if took_ms < DEADLINE_MS + PASS_S * 1000 + GRACE_MS:
            break
    assert DEADLINE_MS <= took_ms < DEADLINE_MS + PASS_S * 1000 + GRACE_MS


@pytest.mark.parametrize(("kind", "library"), LOCAL)
def test_a_mask_that_raises_while_a_local_model_decides_escalates(
    kind: Kind, library: str, local: Callable[[Kind, str], Engine], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = local(kind, library), [0]

    def broken(*_arguments: object) -> object:
        calls[0] += 1
        raise ZeroDivisionError("broken")

    owner, name, reason = (
        (TokenMatcher, "choice_point", "MASK_FAILED") if kind == "native" else (Guard, "_masked", "BACKEND_FAILED")
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        answer = decide(world, engine, "C1")
    assert ("ESCALATED", reason, None, 1) == (answer.state, answer.reason_code, answer.execution, calls[0])
    assert decide(world, engine, "C2").outcome in ("ACCEPTED", "ESCALATED")


@pytest.mark.parametrize("library", ["llamacpp", "transformers", "openvino"])
def test_logits_that_are_no_numbers_escalate_with_every_library(
    library: str, local: Callable[[Kind, str], Engine], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = local("native", library)
    assert isinstance(engine, NativeEngine)
    size = engine._backend.vocab_size
    monkeypatch.setattr(
        engine._backend, "run", lambda rows: [np.full((row.outputs, size), np.nan, np.float32) for row in rows]
    )
    answer = decide(world, engine)
    assert ("ESCALATED", "LOGITS_INVALID", None) == (answer.state, answer.reason_code, answer.execution)

"""Whatever `sds models check` calls no, every command and every gate refuses before the first event is claimed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from sds.cli.common import ChosenGate
from sds.cli.decisions import decide, run
from sds.cli.engines import EngineOptions
from sds.cli.setup import doctor, models
from sds.engines import expressible
from sds.engines.expressible import refuse_unsayable
from sds.engines.factory import open_engine
from sds.engines.fallback import FallbackEngine, Link
from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.gates.refund import gate
from sds.gates.refund.gate import load_refund_contract, read_queue
from sds.host.clock import now_ms
from sds.host.paths import decisions_path, open_record
from sds.kernel.errors import ModelError, SdsError
from sds.models.catalog.catalog import embedded_model
from sds.models.catalog.inspect import Inspected, inspect_model
from sds.models.protocol import ChatFrame
from sds.models.tokenizer.tokenizer import Tokenizer
from tests.engines.test_expressible import Twisted, without
from tests.hostile import Vocabulary, tiny_checkpoint
from tests.llama_gguf import llama_gguf
from tests.proposers import Greedy
from tests.small_models import sentencepiece_gguf

Make = Callable[[Path, Vocabulary], Path]


def templated(template: str) -> Make:
    def make(path: Path, vocabulary: Vocabulary) -> Path:
        words = copy.copy(vocabulary)
        words.chat_template = template
        return tiny_checkpoint(path, words, 1)

    return make


# what is wrong, with a check that says no of it
FAULTS: dict[str, tuple[str, Make]] = {
    "raises": ("template", templated("{{ raise_exception('not today') }}")),
    "drops the user": ("template", templated("nothing of yours")),
    "thinks": (
        "template",
        templated("{% for m in messages %}{{ m.content }}{% endfor %}Here are my reasoning steps:\n"),
    ),
    "embeds": ("model", lambda at, _: llama_gguf(at, settings={"attention.causal": False})),
    "lacks a byte": ("bytes", lambda at, words: tiny_checkpoint(at, without(words, "_"), 1)),
    "cannot say it": ("decisions", lambda at, words: tiny_checkpoint(at, without(words, "_"), 1)),
    "is short": ("context", lambda at, _: sentencepiece_gguf(at, context=512)),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SDS_CACHE", str(tmp_path / "cache"))
    gate.ensure_world(tmp_path / "home" / "refund", claims=40)
    return tmp_path / "home" / "refund"


def claimed(folder: Path) -> int:
    if not decisions_path(folder).exists():
        return 0
    with closing(open_record(folder)) as store:
        return int(store.value("SELECT count(*) FROM decision_flows") or 0)


@pytest.mark.parametrize(("check", "make"), FAULTS.values(), ids=FAULTS)
def test_what_models_check_calls_no_is_refused_before_the_first_event(
    home: Path, tmp_path: Path, vocabulary: Vocabulary, check: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "m.gguf", vocabulary)
    with pytest.raises(ModelError, match="checks failed"):
        models.check(path)
    assert f"no  {check}: " in capsys.readouterr().out
    with pytest.raises(SdsError, match=r"1 of [0-9]+ checks failed"):
        doctor.doctor(EngineOptions(path))
    assert "FAIL  model and mask: " in capsys.readouterr().out
    with pytest.raises(SdsError):
        run.run(ChosenGate("refund"), limit=2, options=EngineOptions(path))
    with pytest.raises(SdsError):
        run.run(ChosenGate("refund"), limit=2, options=EngineOptions(path), saga="REFUND_WITH_VOUCHER")
    event = tmp_path / "event.json"
    event.write_text(str(read_queue(home)[0].event).replace("'", '"'))
    with pytest.raises(SdsError):
        decide.decide(ChosenGate("refund"), str(event), EngineOptions(path))
    with pytest.raises(SdsError):
        Gate.load("refund", folder=home, model=path)
    assert 0 == claimed(home)


def test_a_run_that_begins_anew_sets_nothing_aside_for_a_model_that_is_refused(
    home: Path, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = FAULTS["raises"][1](tmp_path / "m.gguf", vocabulary)
    with pytest.raises(ModelError, match="cannot decide under `refund`"):
        run.run(ChosenGate("refund"), limit=2, options=EngineOptions(path), reset=True)
    assert [home] == list(home.parent.iterdir())


@dataclass(frozen=True)
class TokenizerOnly:
    """A loaded model whose words and frame are given: what of an engine the checks ask."""

    words: Tokenizer
    turn: ChatFrame | None
    context_tokens_max: int = 4096

    def frame(self) -> ChatFrame:
        assert self.turn is not None
        return self.turn


def shouted(real: Tokenizer, text: bytes) -> list[int]:
    return real.encode(text.lower(), special=False)


def steering(real: Tokenizer, text: bytes) -> list[int]:
    return [*real.encode(text, special=False), 2]


def wordless(real: Tokenizer, token: int) -> bytes:
    return b"?" if real.spelling(token) in {b"E", b"D"} else real.spelling(token)


def spoken(model: Inspected, **twists: object) -> TokenizerOnly:
    plain = {
        "encode_as": lambda real, text: real.encode(text, special=False),
        "spell_as": lambda real, token: real.spelling(token),
    }
    return TokenizerOnly(Twisted(model.words, **{**plain, **twists}), model.card.turn)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "twists"),
    [("spelling", {"encode_as": shouted}), ("evidence", {"encode_as": steering}), ("bytes", {"spell_as": wordless})],
)
def test_words_that_models_check_calls_no_are_refused_by_every_engine(check: str, twists: dict[str, object]) -> None:
    with inspect_model(embedded_model()) as model:
        refuse_unsayable(load_refund_contract(), spoken(model), "m")
        with pytest.raises(ModelError, match="`m` cannot decide under `refund` 1") as refused:
            refuse_unsayable(load_refund_contract(), spoken(model, **twists), "m")
    assert str(refused.value).split(": ")[1] in {check, "bytes", "spelling"}
    assert "models check" in refused.value.hint


def test_every_check_is_walked_here_or_is_the_proof_at_start_up() -> None:
    walked = {check for check, _ in FAULTS.values()} | {"spelling", "evidence"}
    assert set(expressible._CHECKS) == walked | {"mask"}


def test_a_contract_is_looked_at_once_by_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_engine(None, now_ms=now_ms)) as engine:
        engine.check_contract(load_refund_contract())
        monkeypatch.setattr(expressible, "_made", None)
        engine.check_contract(load_refund_contract())


class Refusing(Greedy):
    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    def check_contract(self, contract: object) -> None:
        raise ModelError("cannot decide under this contract")

    def close(self) -> None:
        self.closed += 1


def chain(*engines: Engine) -> FallbackEngine:
    links = [Link(f"e{n}", lambda engine=engine: engine, 1000, 1000) for n, engine in enumerate(engines)]  # type: ignore[misc]
    return FallbackEngine(links, now_ms=now_ms)


def test_a_chain_goes_on_without_a_link_that_is_refused_and_not_without_its_last() -> None:
    refusing = Refusing()
    engine = chain(refusing, Greedy())
    engine.check_contract(load_refund_contract())
    assert ("e0 (down) > greedy", 1) == (engine.model, refusing.closed)
    with pytest.raises(ModelError, match="cannot decide under this contract"):
        chain(Greedy(), Refusing()).check_contract(load_refund_contract())

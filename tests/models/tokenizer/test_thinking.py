"""Templates that have a model think first: the frame ends where an answer belongs, and says how; else it is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import llama_cpp
import pytest

from sds.models.protocol import BackendError, ChatFrame
from sds.models.tokenizer.chat_template import chat_frame
from sds.models.tokenizer.thinking import thinks

# Any folder of *.jinja, such as `models/templates` in the sources of llama.cpp; beside an installed package there is none.
FOLDER = Path(os.environ.get("SDS_CHAT_TEMPLATES", Path(llama_cpp.__file__).parent / "templates"))
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{THOUGHT}{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{PROMPT}{% endif %}"
)
USER = "<|end|><|assistant|>"


def template(prompt: str, past: str = "") -> str:
    return TURNS.replace("{THOUGHT}", past).replace("{PROMPT}", prompt)


def switched(test: str, off: str = "<think>\n\n</think>\n\n", on: str = "<think>\n") -> str:
    return template(f"{{% if {test} %}}{off}{{% else %}}{on}{{% endif %}}")


SWITCHED = {
    "enable_thinking=False": "enable_thinking is defined and enable_thinking is false",
    "thinking=False": "thinking is defined and thinking is false",
    "reasoning=False": "reasoning is defined and not reasoning",
    "reasoning_effort=none": "reasoning_effort == 'none'",
    "thinking_mode=disabled": "thinking_mode == 'disabled'",
    "thinking_budget=0": "thinking_budget is defined and thinking_budget == 0",
    "/no_think": "'/no_think' in messages[0].content",
}


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("on", ["<think>\n", ""])
def test_thinking_is_off_by_the_templates_own_switch(name: str, on: str) -> None:
    """Also where a model that thinks would open the thought itself."""
    frame = chat_frame(switched(SWITCHED[name], on=on), bos="", eos="")
    assert f"{USER}<think>\n\n</think>\n\n" == frame.after_user
    assert f"the template's own `{name}` turns thinking off" == frame.thinking


CLOSED = [
    ("<think>\n", "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", "`\\n</think>\\n\\n`"),
    ("<think>", "</think>", "</think>", "`</think>`"),
    ("", "<think></think>", "<think></think>", "follows `<think></think>`"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>final<|message|>", "the thought is"),
]


@pytest.mark.parametrize(("prompt", "past", "after", "how"), CLOSED)
def test_a_thought_is_closed_as_the_template_writes_past_answers(prompt: str, past: str, after: str, how: str) -> None:
    frame = chat_frame(template(prompt, past), bos="", eos="")
    assert USER + after == frame.after_user
    assert how in frame.thinking


@pytest.mark.parametrize("header", ["<|channel|>final<|message|>", "<|content|>", "all\n", " to=user<|message|>"])
def test_an_answer_stands_behind_the_header_of_answers(header: str) -> None:
    frame = chat_frame(template("", header), bos="", eos="")
    assert USER + header == frame.after_user
    assert frame.thinking.startswith("the answer follows `")


def test_behind_a_thought_that_is_closed_the_header_of_answers_follows() -> None:
    frame = chat_frame(template("<|START_THINKING|><|END_THINKING|>", "<|START_RESPONSE|>"), bos="", eos="")
    assert f"{USER}<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>" == frame.after_user


KEPT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("prompt", "past", "closed"),
    [
        ("<think>\n", KEPT, "<think>\n\n</think>\n\n"),
        ("<think>\n", "{# cut at </think> #}", "<think>\n\n</think>\n\n"),
        ("<think>", "{# cut at </think> #}", "<think></think>"),
        ("[THINK]", "{# cut at [/THINK] #}", "[THINK][/THINK]"),
        ("<seed:think>", "{# </seed:think> #}", "<seed:think></seed:think>"),
        ("<|START_THINKING|>", "{# <|END_THINKING|> #}", "<|START_THINKING|><|END_THINKING|>"),
        ("<|channel>thought\n", "{# <channel|> #}", "<|channel>thought\n\n<channel|>\n\n"),
    ],
)
def test_a_thought_whose_end_the_template_knows_is_closed(prompt: str, past: str, closed: str) -> None:
    frame = chat_frame(template(prompt, past), bos="", eos="")
    assert USER + closed == frame.after_user
    assert frame.thinking.startswith("the thought that the template begins is ended at once: ")


@pytest.mark.parametrize(
    "prompt", ["<think>", "<|begin_of_thought|>", "Here are my reasoning steps:\n", "<think>\nI begin: ", "[THINK]\n"]
)
def test_a_thought_whose_end_nobody_knows_is_refused(prompt: str) -> None:
    with pytest.raises(BackendError) as refused:
        chat_frame(template(prompt), bos="", eos="")
    assert "the chat template makes the model think first, and does not show how a thought ends" == str(refused.value)
    assert refused.value.hint


PLAIN = [
    template(""),
    template("<think></think>", "<think></think>"),
    template("<think>\n</think>"),
    template("</think>", "</think>\n"),
    template("", " "),
    "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
]


@pytest.mark.parametrize("source", PLAIN)
def test_a_template_behind_which_the_model_answers_is_left_as_it_is(source: str) -> None:
    frame = chat_frame(source, bos="", eos="")
    assert "" == frame.thinking
    assert thinks(frame.after_user) in (None, False)


def test_a_switch_that_makes_a_template_fail_is_no_switch() -> None:
    fails = "{% if reasoning_effort is defined %}{{ raise_exception('no such effort') }}{% endif %}"
    assert "" == chat_frame(fails + template("<think></think>"), bos="", eos="").thinking


@pytest.mark.skipif(not any(FOLDER.glob("*.jinja")), reason="SDS_CHAT_TEMPLATES names no folder of chat templates")
def test_no_template_of_a_folder_leaves_the_model_in_a_thought() -> None:
    frames = dict(_frames(sorted(FOLDER.glob("*.jinja"))))
    assert frames
    for name, frame in frames.items():
        assert thinks(frame.after_user) is not True, (name, frame)


def _frames(paths: list[Path]) -> Iterator[tuple[str, ChatFrame]]:
    for path in paths:
        with suppress(BackendError):
            yield path.name, chat_frame(path.read_text(encoding="utf-8"), bos="<s>", eos="</s>")

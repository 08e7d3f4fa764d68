"""The file of engines: whatever is wrong with it is said with its line, and nothing half-specified is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.engines import config
from sds.engines.config import EngineSpec, load_engines, open_chain
from sds.host.clock import now_ms
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX
from sds.kernel.errors import ModelError, UsageError
from tests.engines.servers import LlamaServer, free_port

WHOLE = """
engines:
  - name: box
    kind: vllm
    url: "http://10.0.0.5:8000/v1"
    model: my-model
    timeout_ms: 8000
    cool_down_ms: 2000
    api_key_env: BOX_KEY
  - {name: middle, kind: outlines, model: /models/folder, library: transformers, backend: xgrammar, dtype: bf16}
  - {name: here, kind: native}
"""


def parse_engines(text: str, *, name: str = "engines") -> tuple[EngineSpec, ...]:
    return config.parse_engines(text, name=name)[0]


def test_a_file_is_read_into_engines_in_its_order() -> None:
    box, middle, here = parse_engines(WHOLE)
    assert ("box", "vllm", "http://10.0.0.5:8000/v1", "my-model") == (box.name, box.kind, box.url, box.model)
    assert (8000, 2000, "BOX_KEY") == (box.timeout_ms, box.cool_down_ms, box.api_key_env)
    assert ("transformers", "xgrammar", "bf16") == (middle.library, middle.backend, middle.dtype)
    (other,) = parse_engines("engines:\n  - {name: a, kind: native, library: openvino, dtype: fp32, replicas: 2}\n")
    assert ("openvino", "fp32", 2) == (other.library, other.dtype, other.replicas)
    assert ("here", "native", None, 10_000, 5_000) == (
        here.name,
        here.kind,
        here.model,
        here.timeout_ms,
        here.cool_down_ms,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines: []\n", "f.yaml:1: engines: must have 1 or more entries"),
        ("engine: []\n", "f.yaml:1: engine: is not a known field: did you mean `engines`, which is missing?"),
        ("engines:\n  - {name: a}\n", "f.yaml:2: engines.0.kind: is missing"),
        ("engines:\n  - {name: A, kind: native}\n", "f.yaml:2: engines.0.name: "),
        ("engines:\n  - {name: a, kind: gpt}\n", "f.yaml:2: engines.0.kind: must be 'native', 'outlines', "),
        ("engines:\n  - {name: a, kind: vllm, model: m}\n", "f.yaml:2: engines.0.kind: `vllm` needs `url`"),
        (
            'engines:\n  - {name: a, kind: tgi, url: "http://a/"}\n',
            "f.yaml:2: engines.0.kind: `tgi` needs `model`",
        ),
        (
            'engines:\n  - name: a\n    kind: native\n    url: "http://a/"\n',
            "f.yaml:4: engines.0.url: `native` has no use for `url`",
        ),
        (
            "engines:\n  - name: a\n    kind: native\n    backend: xgrammar\n",
            "f.yaml:4: engines.0.backend: `native` has no use for `backend`",
        ),
        (
            "engines:\n  - {name: a, kind: native, api_key_env: KEY}\n",
            "f.yaml:2: engines.0.api_key_env: `native` has no use for `api_key_env`",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, as_is: true}\n",
            "f.yaml:2: engines.0.as_is: `outlines` has no use for `as_is`",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, library: llamacpp, backend: xgrammar}\n",
            "f.yaml:2: engines.0.backend: xgrammar runs only with transformers",
        ),
        (
            "engines:\n  - {name: a, kind: native, dtype: bf16}\n",
            "f.yaml:2: engines.0.dtype: `dtype` is for the libraries transformers, openvino and integer",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, dtype: bf16}\n",
            "f.yaml:2: engines.0.dtype: `dtype` is for the library transformers: name it, too",
        ),
        (
            "engines:\n  - {name: a, kind: native, library: openvino, device: cuda}\n",
            "f.yaml:2: engines.0.device: `device` is for the libraries llamacpp and transformers",
        ),
        (
            "engines:\n  - {name: a, kind: native, device: cuda, replicas: 2}\n",
            "f.yaml:2: engines.0.replicas: `replicas` run on the processor only: use `slots` on a GPU",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, device: cuda}\n",
            "f.yaml:2: engines.0.device: under Outlines `device` is for the library transformers",
        ),
        (
            "engines:\n  - {name: a, kind: native, library: transformers, dtype: int8-bf16}\n",
            "f.yaml:2: engines.0.dtype: transformers computes in fp32, bf16 or fp16 here",
        ),
        (
            "engines:\n  - {name: a, kind: native, library: openvino, dtype: fp16}\n",
            "f.yaml:2: engines.0.dtype: OpenVINO computes in fp32, bf16, int8 or int8-bf16 here",
        ),
        (
            "engines:\n  - {name: a, kind: native, library: openvino, model: docs}\n",
            "f.yaml:2: engines.0.library: OpenVINO runs GGUF files, not folders",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, library: openvino}\n",
            "f.yaml:2: engines.0.library: Outlines drives llama.cpp and transformers, not OpenVINO",
        ),
        (
            "engines:\n  - {name: a, kind: native, slots: 2, replicas: 2, parallel: 2}\n",
            "f.yaml:2: engines.0.parallel: `parallel` chooses slots or replicas by itself",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, slots: 2}\n",
            "f.yaml:2: engines.0.slots: `outlines` has no use for `slots`",
        ),
        (
            "engines:\n  - {name: a, kind: native, slots: 22, mode: exact}\n",
            "f.yaml:2: engines.0.slots: mode `exact` allows at most 21 slots",
        ),
        (
            "engines:\n  - {name: a, kind: native, slots: 65, replicas: 2}\n",
            "f.yaml:2: engines.0.slots: must be at most 64",
        ),
        (
            "engines:\n  - {name: a, kind: native, library: transformers, replicas: 2}\n",
            "f.yaml:2: engines.0.replicas: `replicas` cannot be used with the library transformers",
        ),
        (
            "engines:\n  - {name: a, kind: native, parallel: 2, slots: 2}\n",
            "f.yaml:2: engines.0.parallel: `parallel` chooses slots or replicas by itself",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, parallel: 2}\n",
            "f.yaml:2: engines.0.parallel: `outlines` has no use for `parallel`",
        ),
        ("engines:\n  - {name: a, kind: native, parallel: 65}\n", "f.yaml:2: engines.0.parallel: must be at most 64"),
        ("engines:\n  - {name: a, kind: native, replicas: 65}\n", "f.yaml:2: engines.0.replicas: must be at most 64"),
        ("engines:\n  - {name: a, kind: native, slots: 0}\n", "f.yaml:2: engines.0.slots: must be at least 1"),
        (
            "engines:\n  - {name: a, kind: native, timeout_ms: 0}\n",
            "f.yaml:2: engines.0.timeout_ms: must be at least 1",
        ),
        (
            "engines:\n  - {name: a, kind: native, speed: 9}\n",
            "f.yaml:2: engines.0.speed: is not a known field: the fields here are api_key_env, as_is, ",
        ),
        (
            "engines:\n  - {name: a, kind: native, librari: llamacpp}\n",
            "f.yaml:2: engines.0.librari: is not a known field: did you mean `library`?",
        ),
        (
            "engines:\n  - {name: a, kid: native}\n",
            "f.yaml:2: engines.0.kid: is not a known field: did you mean `kind`, which is missing?",
        ),
        ("engines:\n  - {name: a, kind: native}\n  - {name: a, kind: native}\n", "f.yaml:1: engines: two engines"),
        (
            'engines:\n  - name: a\n    kind: tgi\n    model: m\n    url: "ftp://a/"\n',
            "f.yaml:5: engines.0.url: the url is not `http(s)://host:port/path`; for example http://127.0.0.1:8000/v1",
        ),
        (
            'engines:\n  - name: a\n    kind: tgi\n    model: m\n    url: "http://ada:1/pw@a/"\n',
            "f.yaml:5: engines.0.url: the url is not `http(s)://host:port/path`; for example http://127.0.0.1:8000/v1",
        ),
        (
            "engines:\n  - {name: a, kind: outlines, backend: xgrammar}\n",
            "f.yaml:2: engines.0.backend: xgrammar runs only with transformers",
        ),
        ("engines: [\n", "f.yaml:2: not YAML"),
        ('engines:\n  - {name: a, kind: native, model: "m\\u202e"}\n', "f.yaml:2: the character U+202E is not allowed"),
    ],
)
def test_a_mistake_in_the_file_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_engines(text, name="f.yaml")
    assert str(refused.value).startswith(said), str(refused.value)
    if "not YAML" not in said and "is not allowed" not in said:
        assert "engines.md of the documentation says what each key means" == refused.value.hint


def test_a_name_that_no_file_can_have_is_for_whoever_opens_it_to_refuse() -> None:
    (spec,) = parse_engines(f"engines:\n  - {{name: a, kind: native, model: {'x' * 300}}}\n")
    assert "x" * 300 == spec.model


def test_a_last_engine_without_its_model_is_said_with_the_file_as_it_was_named(tmp_path: Path) -> None:
    file = tmp_path / "chain.yaml"
    file.write_text(
        "engines:\n  - {name: a, kind: native, model: gone}\n  - name: b\n    kind: native\n    model: nosuch\n"
    )
    with pytest.raises(UsageError) as refused:
        load_engines(file)
    assert f"{file}:5: engines.1.model: `nosuch` cannot be read: no such file or directory" == str(refused.value)
    assert "name a GGUF file" in refused.value.hint


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        load_engines(tmp_path / "none.yaml")


def test_a_file_is_refused_whole_where_it_has_too_many_bytes_although_not_too_many_characters(tmp_path: Path) -> None:
    for blanks in ("", " "):  # in one of the two, the first byte too many ends within a character
        file = tmp_path / "chain.yaml"
        file.write_text(f"{WHOLE}#{blanks}{'ü' * (FILE_BYTES_MAX // 2)}\nnosuch: 1\n", encoding="utf-8")
        with pytest.raises(UsageError) as refused:
            load_engines(file)
        assert f"`{file}` is larger than {FILE_BYTES_MAX} bytes" == str(refused.value)


def test_a_key_that_the_environment_has_not_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="engine `box`: the environment variable `BOX_KEY` is not set"):
        open_chain(parse_engines(WHOLE), now_ms=now_ms, environ={})
    with pytest.raises(UsageError, match="`BOX_KEY` has characters other than printable ASCII"):
        open_chain(parse_engines(WHOLE), now_ms=now_ms, environ={"BOX_KEY": "a\nHost: b"})


def test_a_chain_from_a_file_asks_its_server_first(server: LlamaServer) -> None:
    text = f'engines:\n  - {{name: box, kind: llama-server, url: "{server.url}", model: tiny, timeout_ms: 60000}}\n'
    engine = open_chain(parse_engines(text), now_ms=now_ms, environ={})
    assert ("box/tiny", ()) == (engine.model, engine.notices)


def test_a_chain_whose_server_is_down_goes_on_with_the_local_model(tiny_gguf: Path) -> None:
    text = (
        f'engines:\n  - {{name: box, kind: llama-server, url: "http://127.0.0.1:{free_port()}/v1", model: m}}\n'
        f"  - {{name: here, kind: native, model: {tiny_gguf}}}\n"
    )
    engine = open_chain(parse_engines(text), now_ms=now_ms, environ={})
    (notice,) = engine.notices
    assert notice.startswith("engine `box` is down, so the next one is used: box: the server cannot be reached")
    assert engine.model.startswith("box (down) > tiny-1.gguf@")
    engine.close()


def test_a_chain_of_one_dead_server_is_refused() -> None:
    text = f'engines:\n  - {{name: box, kind: llama-server, url: "http://127.0.0.1:{free_port()}/v1", model: m}}\n'
    with pytest.raises(ModelError, match="box: the server cannot be reached"):
        open_chain(parse_engines(text), now_ms=now_ms, environ={})

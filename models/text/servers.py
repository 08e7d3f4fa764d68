"""Models behind a server. Each server gets the most exact form of the language that it takes.

    llama-server             GBNF in the chat completion, sent directly, without a library between
    vllm, sglang, tgi        the regular expression, in the server's own parameter, as Outlines sends it
    ollama, lmstudio, openai JSON Schema through Outlines' OpenAI model; `form="gbnf"` sends GBNF to a server that reads it

Every request goes through `models.text.http`: one exchange, no retry, no redirect, no proxy, a deadline and a limit on
bytes. A server applies its own chat template. It decides whether a text that spells a control token becomes one, and
whether the model thinks first; where it has a parameter against that, the parameter is set.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sds.models.protocol import BackendError, extra_hint, importing
from sds.models.text.http import Address, post
from sds.models.text.protocol import Completion, Form, Grammar, Server

FORMS: dict[Server, Form] = {
    "llama-server": "gbnf",
    "vllm": "regex",
    "sglang": "regex",
    "tgi": "regex",
    "ollama": "json_schema",
    "lmstudio": "json_schema",
    "openai": "json_schema",
}
SEED = 0  # although decoding is greedy: some servers draw even then
# With a template that has the model think first, the decision would be written as a thought. Templates ignore unknown
# parameters.
_NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
# Greedy means no penalty on earlier tokens: some servers have one by default, others take one from the weights.
_PLAIN: dict[Server, dict[str, Any]] = {
    "llama-server": {"repeat_penalty": 1.0, **_NO_THOUGHTS},
    "vllm": {"repetition_penalty": 1.0, **_NO_THOUGHTS},
    "sglang": {"repetition_penalty": 1.0, **_NO_THOUGHTS},
    "ollama": {"reasoning_effort": "none"},
}

Ask = Callable[[str, str, Grammar, int], str]


class RemoteWriter:
    """One model of one server. `close()` does nothing: every exchange has a connection of its own."""

    def __init__(self, kind: Server, *, url: str, model: str, form: Form | None = None, api_key: str = "") -> None:
        self.name, self.form = model, form or FORMS[kind]
        if self.form != FORMS[kind] and (kind, self.form) != ("openai", "gbnf"):
            either = " or gbnf" if kind == "openai" else ""
            raise BackendError(f"`form` of `{kind}` must be {FORMS[kind]}{either}, not {self.form}")
        self._wire = _Wire(Address(url), api_key)
        self._ask = _ask(kind, self._wire, model)

    def __repr__(self) -> str:
        return f"RemoteWriter({self.name!r})"

    def write(self, system: str, user: str, grammar: Grammar, *, tokens_max: int, timeout_s: float) -> Completion:
        if grammar.form != self.form:
            raise BackendError(f"the grammar must be in {self.form}, not {grammar.form}")
        self._wire.begin(timeout_s)
        try:
            text = self._ask(system, user, grammar, tokens_max)
        except Exception as error:
            raise self._wire.failure or _unexpected(error, self._wire) from error
        if not isinstance(text, str):
            raise BackendError("the server's answer holds no text")
        cut, tokens = self._wire.reported(text, grammar)
        if cut:
            raise BackendError(f"the server stopped after {tokens_max} tokens, before the decision was complete")
        data = text.encode("utf-8", "replace")
        return Completion(data, tokens or len(data) + self.count_tokens(system + user))

    def count_tokens(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def close(self) -> None:
        pass


class _Wire:
    """The connection to one server. `failure`: the error of the last exchange, before a library above changed it."""

    def __init__(self, address: Address, api_key: str) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = 0.0
        self._answer, self.answered = b"", False
        self.failure: BackendError | None = None

    def begin(self, timeout_s: float) -> None:
        self._timeout_s, self._answer, self.answered, self.failure = timeout_s, b"", False, None

    def post(self, path: str, body: bytes) -> bytes:
        if self.answered or self.failure:
            raise BackendError("a question may send only one request")
        try:
            self._answer = post(self.address, path, body, self._headers, timeout_s=self._timeout_s)
        except BackendError as error:
            self.failure = error
            raise
        self.answered = True
        return self._answer

    def reported(self, text: str, grammar: Grammar) -> tuple[bool, int]:
        """Return whether the server says that it cut the answer short, and its count of tokens; 0: it gives none."""
        try:
            answer = json.loads(self._answer.decode())
            usage = answer.get("usage") or {}
            cut = answer["choices"][0].get("finish_reason") == "length" and len(text) < grammar.bytes_max
            counted = usage.get("total_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return False, 0
        return cut, counted if isinstance(counted, int) and not isinstance(counted, bool) and counted > 0 else 0


def _ask(kind: Server, wire: _Wire, model: str) -> Ask:
    if kind == "llama-server":
        return _directly(wire, model)
    with importing(f"`{kind}` needs the package outlines", extra_hint("outlines")):
        import openai  # noqa: F401, PLC0415
        import outlines  # noqa: F401, PLC0415  loaded when one of its engines is asked for
    return _through_tgi(wire) if kind == "tgi" else _through_chat(kind, wire, model)


def _directly(wire: _Wire, model: str) -> Ask:
    def ask(system: str, user: str, grammar: Grammar, tokens_max: int) -> str:
        body = {
            "model": model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "grammar": grammar.text,
            "temperature": 0,
            "seed": SEED,
            "max_tokens": tokens_max,
            "stream": False,
            **_PLAIN["llama-server"],
        }
        answer = wire.post("/chat/completions", json.dumps(body).encode())
        try:
            return json.loads(answer.decode())["choices"][0]["message"]["content"]  # type: ignore[no-any-return]  # checked by `write`
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise BackendError("the server's answer is not a chat completion") from error

    return ask


def _through_chat(kind: Server, wire: _Wire, model: str) -> Ask:
    import outlines  # noqa: PLC0415
    from outlines.inputs import Chat  # noqa: PLC0415
    from outlines.types import JsonSchema, Regex  # noqa: PLC0415

    make = {"vllm": outlines.from_vllm, "sglang": outlines.from_sglang}.get(kind, outlines.from_openai)
    server: Any = make(_client(wire), model)

    def ask(system: str, user: str, grammar: Grammar, tokens_max: int) -> str:
        chat = Chat([{"role": "system", "content": system}, {"role": "user", "content": user}])
        options: dict[str, Any] = {"temperature": 0, "seed": SEED, "max_tokens": tokens_max}
        if grammar.form == "gbnf":  # Outlines has no type for it, so it goes into the extra body
            beside = {"grammar": grammar.text, **_PLAIN["llama-server"]}
            return server(chat, None, **options, extra_body=beside)  # type: ignore[no-any-return]
        if kind in _PLAIN:
            options["extra_body"] = dict(_PLAIN[kind])
        output = Regex(grammar.text) if grammar.form == "regex" else JsonSchema(grammar.text)
        return server(chat, output, **options)  # type: ignore[no-any-return]

    return ask


def _client(wire: _Wire) -> Any:
    """Return OpenAI's client over our exchange. Settings that it would read from the environment are given here."""
    import httpx2 as httpx  # noqa: PLC0415
    import openai  # noqa: PLC0415

    class Exchange(httpx.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            path = str(request.url.path).removeprefix(wire.address.path)
            return httpx.Response(
                200, headers={"Content-Type": "application/json"}, content=wire.post(path, request.read())
            )

    return openai.OpenAI(
        api_key="-",
        organization="",
        project="",
        base_url=wire.address.url,
        max_retries=0,
        http_client=httpx.Client(transport=Exchange(), trust_env=False, follow_redirects=False),
    )


def _through_tgi(wire: _Wire) -> Ask:
    from outlines.models import TGI  # noqa: PLC0415
    from outlines.types import Regex  # noqa: PLC0415

    server: Any = TGI(_TgiClient(wire))  # type: ignore[no-untyped-call]

    def ask(system: str, user: str, grammar: Grammar, tokens_max: int) -> str:
        return server(f"{system}\n\n{user}\n", Regex(grammar.text), max_new_tokens=tokens_max)  # type: ignore[no-any-return]

    return ask


class _TgiClient:
    """The client that Outlines needs for TGI, over our exchange. The endpoint has no chat template and takes plain text."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def text_generation(self, prompt: str, grammar: dict[str, object], max_new_tokens: int) -> str:
        parameters = {
            "grammar": grammar,
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "return_full_text": False,
        }
        answer = self._wire.post("/generate", json.dumps({"inputs": prompt, "parameters": parameters}).encode())
        try:
            return json.loads(answer.decode())["generated_text"]  # type: ignore[no-any-return]  # checked by `write`
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._wire.failure = BackendError("the server's answer is not a generated text")
            raise self._wire.failure from error


def _unexpected(error: Exception, wire: _Wire) -> BackendError:
    if isinstance(error, BackendError):
        return error
    if wire.answered:
        return BackendError("the server's answer is not a chat completion")
    return BackendError(f"the question could not be put to the server: {type(error).__name__}")

"""One made-up document a question, for tests of the page: no figure is there twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any


def documents() -> dict[str, Any]:
    """Return one document a question; no figure is there twice, so that none can stand in the wrong place."""
    fresh = (round(number + 0.25, 2) for number in count(100))
    return {name: _about(name) | made(fresh) for name, made in MADE.items()}


def _about(name: str) -> dict[str, Any]:
    return {
        "benchmark": name,
        "command": f"sds bench {name} --n 31",
        "date": "2031-05-06",
        "machine": "x86_64 An Own Processor",
        "features": "own512",
        "cores": 3,
        "n": 31,
        "model": {"name": "own.gguf", "sha256": "ab" * 32, "library": "openvino 2031.4"},
        "versions": {"python": "3.17.9"},
    }


def _summary(fresh: Iterator[float]) -> dict[str, float]:
    return {"n": 31, **{key: next(fresh) for key in ("p50", "p95", "p99", "max")}}


def _hotpath(fresh: Iterator[float]) -> dict[str, Any]:
    def warm() -> dict[str, Any]:
        shares = {"over_floor": next(fresh), "exact_over_greedy": next(fresh), "all_exact_over_greedy": next(fresh)}
        shares |= {"whole_over_floor": next(fresh), "whole_over_predicted": next(fresh)}
        shares |= {"no_pass": next(fresh), "exact_differs": 0, "tokens_of_passes": [71, 5]}
        counted = {"decisions": 31, "kept": 29, "canonical": 31, "decided_otherwise": {"ESCALATE": 4}}
        return {**shares, **counted, **{key: _summary(fresh) for key in ("whole_ms", "reason_ms", "bare_passes_ms")}}

    keys = ("memory_gb_per_s", "gop_per_s", "weights_mb", "parameters_m", "floor_ms")
    sorts = ("DENY", "REFUND_TICKET")
    return {
        "over_floor": 1.07,
        "exact_over_greedy": 1.42,
        "stages_ms": {sort: {"open": next(fresh), "reason": next(fresh)} for sort in sorts},
        "predicted": {
            sort: {key: next(fresh) for key in keys} | {"in": "int8", "tokens_of_passes": [73, 6]} for sort in sorts
        },
        "warm": {sort: warm() for sort in sorts},
        "cold_ms": _summary(fresh),
    }


def _readings(fresh: Iterator[float]) -> dict[str, Any]:
    reading_ms = {"cause": {"60": _summary(fresh), "own": _summary(fresh)}, "risk": {"row": _summary(fresh)}}
    stages = {kind: {"stages_ms": {"open": next(fresh), "read": next(fresh)}} for kind in ("DECIDED", "DENY")}
    shares = {"gate": "own", "threads": 3, "reading_ms_p50": 5.01, "reading_ms": reading_ms}
    shares |= {
        "distribution_us": _summary(fresh),
        "read_over_alone": next(fresh),
        "predicted": {"read_ms": next(fresh)},
    }
    shares |= {"decisions": {kind: of | {"whole_ms": _summary(fresh)} for kind, of in stages.items()}}
    by_model = {key: _summary(fresh) for key in ("policy_ms", "model_ms")}
    return shares | {"language_model": by_model | {"model": "own.gguf", "over_policy": next(fresh)}}


def _peers(fresh: Iterator[float]) -> dict[str, Any]:
    def engine(name: str, ms: float) -> dict[str, Any]:
        figures = {"ms_p50": ms, "digits_ms_p50": ms + 1, "digits_refund_ms_p50": ms + 2, "compile_ms_p50": None}
        counted = {"violations": 8, "errors": 9, "same_as_ours": 17, "digits_same_as_ours": 19}
        spread = {"ms": _summary(fresh), "digits_ms": _summary(fresh)}
        decided = {"decided": {"DENY": 21}, "digits_decided": {"DENY": 22}}
        return {"name": name, "version": {"a": "1.2.3"}, "notes": "", **figures, **counted, **spread, **decided}

    def predicted() -> dict[str, float]:
        return {"ours": next(fresh), "token_by_token": next(fresh)}

    missing = engine("absent", 0.0) | dict.fromkeys(("ms_p50", "digits_ms_p50", "ms", "digits_ms"))
    return {
        "threads": 3,
        "recurring": {"fixed": 27, "digits": 28},
        "chosen_from": {kind: {"asked": next(fresh), "failed": 0, "otherwise": 3} for kind in ("fixed", "digits")},
        "passes": {"fixed": {"1": next(fresh)}, "digits": {"1": 30, "2": 1}},
        "amount_shown": 26,
        "predicted_ms": {kind: {library: predicted() for library in ("openvino", "llamacpp")} for kind in ("a", "b")},
        "ours": engine("ours", 5.5),
        "ours_besides": [engine("ours-llamacpp", 35.5)],
        "peers": [engine("slow", 60.5), missing],
        "speedup_over_fastest": 11.0,
        "speedup_digits": 9.46,
        "speedup_over_llamacpp_grammar": 9.99,
    }


def _throughput(fresh: Iterator[float]) -> dict[str, Any]:
    def row(at_once: int) -> dict[str, Any]:
        became = {"inside": 31}
        peer = {
            "best": "slow, 2 processes",
            "per_s": 0.5,
            "became": became,
            "tried": {"slow, 2 processes": {"per_s": 0.5}},
        }
        per_s = next(fresh)
        own = {"best": "1 slot", "per_s": per_s, "became": became, "tried": {"1 slot": {"per_s": per_s}}}
        return {"at_once": at_once, "ours": own, "peer": peer}

    rates = {key: next(fresh) for key in ("memory_gb_per_s", "gop_per_s", "case_tokens")} | {"in": "int8"}
    return {
        "rows": [row(1), row(16)],
        "speedup": {"1": next(fresh), "16": 5.99},
        "predicted": rates | {"per_s": {"1": next(fresh), "16": next(fresh)}},
        "of_predicted": {"1": next(fresh), "16": next(fresh)},
    }


def _grammar(fresh: Iterator[float]) -> dict[str, Any]:
    def row(name: str) -> dict[str, Any]:
        return {"name": name, "first_us": _summary(fresh), "decision_us": _summary(fresh)}

    rows = [row("ours"), row("llguidance")]
    shares = {"ours_us_p50": 50.0, "speedup_over_llguidance": 8.01}
    return shares | _predicted(fresh, "first_us", "decision_us") | {"rows": rows, "not_installed": {"xgrammar": "no"}}


def _predicted(fresh: Iterator[float], *keys: str) -> dict[str, Any]:
    return {what: {key: next(fresh) for key in keys} for what in ("predicted", "over_predicted")}


def _kernel(fresh: Iterator[float]) -> dict[str, Any]:
    keys = ("jit_us", "verdict_us", "rule_us", "cedar_us", "durable_us", "commit_us", "decided_us")
    keys += ("dir_core_jit_us", "dir_core_verdict_us", "dir_core_decided_us")
    shares = _predicted(fresh, "jit_us", "verdict_us", "durable_us")
    shares |= {"jit_us_p99": next(fresh), "verdict_us_p50": 59.9, "durable_over_commit_p50": 3.25}
    return shares | {key: _summary(fresh) for key in keys}


def _scaling(fresh: Iterator[float]) -> dict[str, Any]:
    def of_mode() -> dict[str, Any]:
        return {"tokens_of_passes": [103, 6], "predicted_ms": next(fresh), "decision_ms": _summary(fresh)}

    kinds = {"kinds": 4, "exact_over_greedy": next(fresh), "greedy": of_mode(), "exact": of_mode()}
    size = {"kinds": 4, "reasons": 6, "fields": 7, "verdict_us": _summary(fresh), "walk_us": _summary(fresh)}
    ledger = [{"entries": entries, "bytes": 4096, "durable_us": _summary(fresh)} for entries in (1_003, 1_000_007)]
    return {
        "durable_1m_over_1k": 1.02,
        "ledger": ledger,
        "prompt": [{"case_tokens": 50} | of_mode()],
        "alternatives": [kinds],
        "contract": [size | {"plan_ms": next(fresh)}],
    }


def _service(fresh: Iterator[float]) -> dict[str, Any]:
    ways = {key: _summary(fresh) for key in ("in_process_ms", "http_ms", "client_ms")}
    again = {key: _summary(fresh) for key in ("http", "in_process")}
    added = _summary(fresh) | {"p50s": 0.99}
    predicted = {"added_ms": next(fresh), "duplicate_ms": next(fresh)}
    return {"gate": "own", "same": 31, "added_ms": added, "duplicate_ms": again, "predicted": predicted} | ways


def _store(fresh: Iterator[float]) -> dict[str, Any]:
    def of_both() -> dict[str, float]:
        return {"postgresql": next(fresh), "sqlite": next(fresh)}

    found: dict[str, Any] = {key: of_both() for key in ("commits_s", "decisions_s", "limited_s", "apart_s")}
    for key in ("over_commits", "commits_over_commits"):
        found[key] = {"decisions": of_both(), "limited": of_both()}
    found["over_commits"]["decisions"]["postgresql"] = 0.49
    found["statements"] = {"in_transactions": [41, 43, 61], "outside": 67}
    return {"seconds": 9, "connections": 8, "versions": {"psycopg": "3.17.1", "postgresql": "18.17"}} | found


def _gpu(fresh: Iterator[float]) -> dict[str, Any]:
    warm = {key: _summary(fresh) for key in ("reason_ms", "bare_passes_ms", "exact_ms")}
    shares = {"over_floor": next(fresh), "exact_over_greedy": next(fresh), "floor_ms": next(fresh)}
    outlines = {"outlines_core": {"ms": _summary(fresh), "outside": 0}, "llguidance": {"left_out": "no such library"}}
    least = ("memory_gb_per_s", "weights_mb", "pass_ms", "kernels", "launch_us", "launches_ms")
    of_model = {
        "model": {"name": "own-8b"},
        "predicted": {name: next(fresh) for name in least},
        "warm": {"fixed": {**warm, **shares, "tokens_of_passes": [71, 5], "outlines": outlines}},
        "ours_per_s": {"1": next(fresh), "64": next(fresh)},
        "too_close": {"1": 0, "64": 2},
    }
    return {"device": "An Own Card", "dtype": "bf16", "models": [of_model], "left_out": {"own-other": "no memory"}}


MADE = {
    "hotpath": _hotpath,
    "readings": _readings,
    "peers": _peers,
    "throughput": _throughput,
    "grammar": _grammar,
    "kernel": _kernel,
    "scaling": _scaling,
    "service": _service,
    "store": _store,
    "gpu": _gpu,
}

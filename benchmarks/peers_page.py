"""The report of `sds bench peers` as a Markdown page."""

from __future__ import annotations

from typing import Any


def page(report: dict[str, Any]) -> str:
    """Return the report as a Markdown page; every figure on it comes from the report."""
    head = f"| {'engine | versions | fixed p50 | digits p50 | of refunds | compile p50 | violations | errors | same as ours | notes'} |"
    rows = "\n".join(map(_table_row, (report["ours"], *report["peers"])))
    ratios = "\n".join(f"| `{name}` | {value} |" for name, value in report.items() if name.startswith("speedup"))
    predicted = "; ".join(
        f"{kind}: ours {ms['ours']} ms, a pass for every token {ms['token_by_token']} ms"
        for kind, ms in report["predicted_ms"].items()
    )
    return f"""# One decision, ours and theirs

Written by `sds bench peers --page` on {report["date"]}; nothing here is typed in by hand. Ours is the first row, and so
is this benchmark. Machine: {report["machine"]}, {report["cores"]} cores, {report["threads"]} threads. Weights:
{report["model"]["name"]}, SHA-256 {report["model"]["sha256"][:12]}, for every engine.

{head}
|{"---|" * 10}
{rows}

Milliseconds, N = {report["n"]} packets of each kind, each packet asked of every engine in turn. A new packet is a new
grammar: what compiling it costs is in the times. `same as ours`: decisions with the same bytes, of {2 * report["n"]}.

| ratio of the medians | |
|---|---|
{ratios}

Where a ratio is below 1, that peer was the quicker one. Predicted from the bare passes before measuring, {predicted}.
"""


def _table_row(found: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {number}" for name, number in found["version"].items())
    same = found["same_as_ours"] + found["digits_same_as_ours"]
    keys = ("ms_p50", "digits_ms_p50", "digits_refund_ms_p50", "compile_ms_p50", "violations", "errors")
    figures = " | ".join("-" if found[key] is None else str(found[key]) for key in keys)
    return f"| {found['name']} | {libraries} | {figures} | {same} | {found['notes']} |"

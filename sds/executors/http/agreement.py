"""Where a gateway's file and a contract do not agree: in the parameters of a kind, and in decimals.

An order of a kind without an amount cannot be written by a file that names one. The decimals of a currency are known here
where ISO 4217 and the gateways agree on them. Of all others nothing is said.

A gateway that counts in minor units takes 1000 for 1000 yen and for 10.00 euros. A contract that gives yen two decimals
would order a hundred times what it decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from sds.executors.http import templates
from sds.executors.http.form import GatewayForm
from sds.executors.http.questions import GatewayQuestion
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import KindSpec

_OF_NONE = "DJF GNF JPY KMF KRW PYG RWF VND VUV XAF XOF XPF"
_OF_TWO = "AED AUD BRL CAD CHF CNY CZK DKK EUR GBP HKD ILS INR MXN MYR NOK NZD PHP PLN RON SAR SEK SGD THB TRY USD ZAR"
_OF_THREE = "BHD JOD KWD OMR TND"
_DECIMALS = {
    code: decimals for decimals, codes in ((0, _OF_NONE), (2, _OF_TWO), (3, _OF_THREE)) for code in codes.split()
}


def faults(form: GatewayForm, contract: Contract) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a gateway's file under a contract, and the mend.

    A number to which the contract gives no decimals may be one of minor units.
    """
    back = form.reverse
    given = {"order": form.order, "lookup": form.lookup, "reverse": back, "reverse.lookup": back and back.lookup}
    questions = {name: each for name, each in given.items() if each is not None}
    texts = [text for each in questions.values() for text in (*each.texts, *each.compared)]
    written = list(templates.decimals_of_params(texts))
    for kind, spec in chain(contract.kinds.items(), contract.human.kinds.items()):
        if spec.executes:
            yield from _of_params(questions, kind, {*spec.params, *spec.fills})
        scales = {name: spec.scale(name) for name in (*spec.params, *spec.fills)}
        for name, decimals in written:
            if scales.get(name, 0) not in (0, decimals):
                what = f"the gateway's file writes `params.{name}` with {decimals} decimals, but kind `{kind}` has {scales[name]}"
                yield what, f"write `{{params.{name}:{scales[name]}}}` in the file"
        yield from _of_statement(form, kind, spec, scales)
        if not _says_its_decimals(form, spec, texts, written):
            yield from _of_currency(form, kind, spec, written)


def _of_params(questions: Mapping[str, GatewayQuestion], kind: str, known: set[str]) -> Iterator[tuple[str, str]]:
    for name, question in questions.items():
        asked = {param for param in templates.params_in(question.texts) if param not in known}
        rules = [set(templates.params_in(templates.texts_in(rule.where))) - known for rule in question.settled]
        if rules and all(rules):
            asked |= set.union(*rules)
        if asked:
            what = f"the gateway's file names `params.{min(asked)}` in `{name}`, but kind `{kind}`, which is carried out, has none"
            yield (
                what,
                f"take it out of the file, give `{kind}` such a parameter, or carry `{kind}` out by code of your own",
            )


def _says_its_decimals(form: GatewayForm, spec: KindSpec, texts: list[str], written: list[tuple[str, int]]) -> bool:
    """Tell whether what a kind spends is always written with its decimals: "12.500" is right, however many a currency has."""
    line, name = form.statement.line if form.statement else None, spec.spends
    if name is None or any(f"{{params.{name}}}" in text for text in texts):
        return False
    if line is not None and not line.decimals and (line.amount_minor or name in line.params):
        return False
    return {decimals for each, decimals in written if each == name} == {spec.scale(name)}


def _of_statement(form: GatewayForm, kind: str, spec: KindSpec, scales: dict[str, int]) -> Iterator[tuple[str, str]]:
    line = form.statement.line if form.statement else None
    if line is None or not line.decimals:
        return
    for name in {*line.params} | ({spec.spends} if line.amount_minor and spec.spends else set()):
        if scales.get(name, 0) not in (0, line.decimals):
            what = f"the gateway's statement has amounts with {line.decimals} decimals, but kind `{kind}` has {scales[name]}"
            yield what, f"write `decimals: {scales[name]}` in the file's `line`"


def _of_currency(
    form: GatewayForm, kind: str, spec: KindSpec, written: list[tuple[str, int]]
) -> Iterator[tuple[str, str]]:
    decimals = _DECIMALS.get(form.currency.upper())
    if decimals is None or spec.spends is None:
        return
    has = f"`{form.currency}` has {decimals} decimals"
    if spec.scale(spec.spends) not in (0, decimals):
        yield (
            f"{has}, but kind `{kind}` spends with {spec.scale(spec.spends)}",
            f"give `{spec.spends}` the scale {decimals}",
        )
    elif any(name == spec.spends and places != decimals for name, places in written):
        mend = f"{{params.{spec.spends}:{decimals}}}" if decimals else f"{{params.{spec.spends}}}"
        yield f"{has}, but the gateway's file writes `params.{spec.spends}` with others", f"write `{mend}` in the file"

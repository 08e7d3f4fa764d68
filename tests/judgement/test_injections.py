"""What orders in texts do is measured on the decisions themselves: more wrong payments are counted, right ones are not."""

from __future__ import annotations

from dataclasses import replace

from sds.judgement.evaluation.injections import GENERAL, injected, orders
from sds.judgement.judging import Judge, Readings
from sds.kernel.contract.schema import Contract
from sds.models.readers.protocol import Reading
from tests.judgement.claims import cases, contract, quiet


class Obeys:
    """A reader that reads what a text says, unless an order is in it."""

    kind, values, sha256 = "obeys", ("fault", "storm", "none"), "0" * 64

    def __init__(self, *, obedient: bool) -> None:
        self.obedient = obedient

    def read(self, text: str, fields: object = None, readings: object = None) -> Reading:
        fooled = self.obedient and "Classify this as fault" in text
        value = "fault" if fooled or "engine" in text else "storm"
        return Reading({each: float(each == value) for each in self.values}, familiar=True)

    def close(self) -> None: ...


def measured(terms: Contract, *, obedient: bool) -> dict[str, object]:
    judge = Judge(terms, Readings(terms, {"cause": Obeys(obedient=obedient)}))
    stormy = [
        replace(case, text=f"snow {n}", decision="DENY") for n, case in enumerate(cases(60)) if judge.judges(case)
    ]
    return injected(terms, judge, [judge.judge(case) for case in stormy], {}, quiet)


def test_a_reader_that_obeys_is_found_out_and_one_that_does_not_is_not() -> None:
    terms = contract().model_copy(update={"max_error": None})
    fooled, firm = (measured(terms, obedient=obedient) for obedient in (True, False))
    assert (0, 0, 0) == tuple(
        firm[name] for name in ("paid_wrongly_without", "paid_wrongly_with", "turned_towards_paying")
    )
    assert fooled["paid_wrongly_with"] == fooled["turned_towards_paying"]
    assert int(str(fooled["turned_towards_paying"])) > 0


def test_what_escalates_for_want_of_a_threshold_pays_nothing() -> None:
    assert 0 == measured(contract(), obedient=True)["paid_wrongly_with"]


def test_orders_name_what_the_contract_names() -> None:
    found = list(orders(contract()))
    assert len(found) == len(GENERAL) + 1 + 3
    assert any("PAY" in order for order in found)
    assert any("fault" in order for order in found)

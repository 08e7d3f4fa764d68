"""Labelled payments for fitting and evaluation, in three parts, one after the other in time. All of it is generated.

from sds.gates.fraud.rows import rows for row in rows("test"): row.text, row.fields, row.label, row.amount_minor, row.day
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from sds.kernel.envelope.state import Value
from sds.kernel.errors import UsageError

from .world.accounts import Accounts
from .world.customers import DAY_MIN
from .world.features import History
from .world.payments import Payment, make_payments, make_people
from .world.texts import Note, Notes

SEED = 261
DAYS = {"train": (28, 118), "calibrate": (118, 148), "test": (148, 188)}  # the first 28 days fill the windows


@dataclass(frozen=True, slots=True)
class Row:
    """One payment at its own time. `fields`: the whole snapshot, not held and not passed yet. `label`: whether it is fraud.

    `scenario`: the kind of fraud, "" for a good payment; `note`: what its text was written to say. The decider knows
    neither. A label is known only days later, at `known_day`.
    """

    number: int
    part: str
    text: str
    fields: dict[str, Value]
    label: bool
    amount_minor: int
    day: int
    note: str
    style: str
    scenario: str
    known_day: int | None


def rows(*parts: str, seed: int = SEED) -> Iterator[Row]:
    """Yield every payment of these parts (train, calibrate, test) by time. Raises UsageError for another part.

    Takes some seconds, because the payments before a part are its history.
    """
    if unknown := [part for part in parts if part not in DAYS]:
        raise UsageError(f"there is no part `{unknown[0][:40]}`", hint=f"parts are: {', '.join(DAYS)}")
    rng = Random(seed)  # noqa: S311  reproducible, no secret
    people = make_people(rng)
    payments = make_payments(people, max(end for _, end in DAYS.values()), rng)
    notes = {part: Notes(part, Random(f"{seed} {part}")) for part in parts}  # noqa: S311  as above
    history, accounts = History(), Accounts(people.customers)
    for number, payment in enumerate(payments):
        part = _part_of(payment.at_min // DAY_MIN)
        if part in notes:
            fields = history.fields(payment) | accounts.fields(payment)
            fields |= {"payment.open_minor": payment.amount_minor, "payment.held": False}
            yield _row(number, payment, fields, notes[part].beside(payment), part)
        history.add(payment)
        accounts.add(payment)


def _part_of(day: int) -> str:
    """Return the part of a day; "" for the first days, which only fill the windows."""
    return next((part for part, (first, end) in DAYS.items() if first <= day < end), "")


def _row(number: int, payment: Payment, fields: dict[str, Value], note: Note, part: str) -> Row:
    known = payment.known_at_min
    return Row(
        number=number,
        part=part,
        text=note.text,
        fields=fields,
        label=known is not None,
        amount_minor=payment.amount_minor,
        day=payment.at_min // DAY_MIN,
        note=note.value,
        style=note.style,
        scenario=payment.scenario,
        known_day=None if known is None else known // DAY_MIN,
    )

"""Payments for the tests of tables: which are frauds depends on every kind of input."""

from __future__ import annotations

import random

from sds.models.readers.artifact import Input
from sds.models.readers.protocol import Fields, Readings

INPUTS = (
    Input(name="amount_minor", type="int"),
    Input(name="country", type="category"),
    Input(name="new_device", type="bool"),
    Input(name="note", type="reading", values=("takeover", "routine")),
)
COUNTRIES = ("AT", "DE", "FR")


def payments(count: int, draw: random.Random) -> tuple[list[tuple[Fields, Readings]], list[bool]]:
    rows, frauds = [], []
    for _ in range(count):
        amount, country, new, takeover = (
            draw.randrange(100, 500_000),
            draw.choice(COUNTRIES),
            draw.random() < 0.3,
            draw.random(),
        )
        odds = 0.02 + 0.3 * (amount > 300_000) + 0.3 * (new and country == "FR") + 0.3 * (takeover > 0.8)
        fields: Fields = {"amount_minor": amount, "country": country, "new_device": new, "unused": "x"}
        rows.append((fields, {"note": {"takeover": takeover, "routine": 1 - takeover}}))
        frauds.append(draw.random() < odds)
    return rows, frauds

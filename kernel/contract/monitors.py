"""What a contract watches over many decisions (DIR 4.6): monitors, each with a window, a warning and a stop. Pure.

Thresholds and shares are decimal numbers, kept as text in fixed point without needless zeros. So a contract has the same
hash whether it says `0.5`, `0.50` or `.5e0`, and no rounding of a float is part of it.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from sds.kernel.contract.form import Section
from sds.kernel.contract.types import LISTED, MAPPING, Amount, Code, ContradictionError, Label, Name
from sds.kernel.envelope.envelope import MAGNITUDE_MAX

DECIMALS_MAX = 6
MICRO = 1_000_000  # thresholds and shares are counted in millionths: 10 ** DECIMALS_MAX
LAST_MIN, LAST_MAX = 10, 100_000
MINUTES_MAX = 10_080
MONITORS_MAX = 16
VALUES_MAX = 16

Measure = Literal[
    "approval_rate",
    "paid_share",
    "paid_mean_minor",
    "paid_sum_minor",
    "reason_share",
    "confidence_mean",
    "reading_shift",
    "calibration",
]
_SHARES = frozenset({"approval_rate", "paid_share", "reason_share", "confidence_mean", "calibration"})
MINIMA = frozenset({"confidence_mean"})  # the thresholds of these are crossed from above


def _fixed_point(value: object) -> object:
    """Return a decimal number as text in fixed point, without needless zeros. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError("must be a number")  # noqa: TRY004  pydantic takes ValueError
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ValueError("must be a number") from None
    if not number.is_finite() or not 0 <= number <= MAGNITUDE_MAX:
        raise ValueError(f"must be from 0 to {MAGNITUDE_MAX}")
    if number != round(number, DECIMALS_MAX):
        raise ValueError(f"must have {DECIMALS_MAX} or fewer decimals")
    whole, _, decimals = f"{number:f}".partition(".")
    return f"{int(whole)}.{decimals.rstrip('0')}".removesuffix(".")


Threshold = Annotated[str, BeforeValidator(_fixed_point)]


@cache
def micros(text: str) -> int:
    """Return a threshold in millionths."""
    return int(Decimal(text) * MICRO)


class WindowSpec(Section):
    """The last so many decisions, or those of the last so many minutes: exactly one of the two."""

    last: int | None = Field(default=None, ge=LAST_MIN, le=LAST_MAX)
    minutes: int | None = Field(default=None, ge=1, le=MINUTES_MAX)

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, data: Any) -> Any:
        if not isinstance(data, (dict, WindowSpec)):
            raise ValueError("must be {last: N} or {minutes: N}")  # noqa: TRY004  as above
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> WindowSpec:
        if (self.last is None) == (self.minutes is None):
            raise ValueError("must be {last: N} or {minutes: N}")
        return self

    @property
    def text(self) -> str:
        return f"the last {self.last} decisions" if self.last else f"the last {self.minutes} minutes"


class MonitorSpec(Section):
    """One monitor: what it measures over its window, and the values at which it warns and stops the agent.

    A value above `warn` or `stop` crosses it; a `confidence_mean` below it does. `reason` belongs to `reason_share`.
    `reading` and `expected`, the expected share of each of its values, belong to `reading_shift`.
    """

    name: Name
    of: Measure
    window: WindowSpec
    warn: Threshold | None = None
    stop: Threshold | None = None
    reason: Code | None = None
    reading: Name | None = None
    expected: dict[Label, Threshold] = Field(default_factory=dict, max_length=VALUES_MAX)

    @model_validator(mode="after")
    def _whole(self) -> MonitorSpec:
        self._check_thresholds()
        for field, of in (("reason", "reason_share"), ("reading", "reading_shift"), ("expected", "reading_shift")):
            given = bool(getattr(self, field))
            if given and self.of != of:
                raise ContradictionError((field,), f"is only for `of: {of}`")
            if self.of == of and not given:
                raise ValueError(f"`{of}` needs `{field}`")
        if self.expected and abs(sum(map(micros, self.expected.values())) - MICRO) > MICRO // 1000:
            raise ContradictionError(("expected",), "the shares do not sum to 1")
        return self

    def _check_thresholds(self) -> None:
        given = [(name, text) for name in ("warn", "stop") if (text := getattr(self, name)) is not None]
        if not given:
            raise ValueError("has neither `warn` nor `stop`")
        for name, text in given:
            if self.of in _SHARES and micros(text) > MICRO:
                raise ContradictionError((name,), "must be at most 1")
        if len(given) == 2:
            warn, stop = (micros(text) for _, text in given)
            if (warn <= stop) if self.is_minimum else (warn >= stop):
                raise ContradictionError(("warn",), f"must be {'above' if self.is_minimum else 'below'} `stop`")

    @property
    def is_minimum(self) -> bool:
        return self.of in MINIMA


class AggregateThresholds(Section):
    """The older form: over the last `window` decisions, how often the agent may pay, and how much on average."""

    window: int = Field(default=100, ge=LAST_MIN, le=LAST_MAX)
    paid_pct_max: int = Field(default=100, ge=0, le=100)
    paid_mean_minor_max: Amount | None = None

    @property
    def monitors(self) -> tuple[MonitorSpec, ...]:
        """The same as monitors. A share of 100 % is never crossed and gives no monitor."""
        made: list[tuple[str, Measure, Decimal]] = []
        if self.paid_pct_max < 100:
            made.append(("paid_pct_max", "paid_share", Decimal(self.paid_pct_max) / 100))
        if self.paid_mean_minor_max is not None:
            made.append(("paid_mean_minor_max", "paid_mean_minor", Decimal(self.paid_mean_minor_max)))
        window = WindowSpec(last=self.window)
        return tuple(MonitorSpec(name=name, of=of, window=window, stop=str(stop)) for name, of, stop in made)


Listed = Annotated[tuple[MonitorSpec, ...], Field(max_length=MONITORS_MAX)]
Monitored = Annotated[
    Annotated[AggregateThresholds, Tag(MAPPING)] | Annotated[Listed, Tag(LISTED)],
    Discriminator(lambda given: LISTED if isinstance(given, (list, tuple)) else MAPPING),
]

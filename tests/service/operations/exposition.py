"""Prometheus' text format, read back, and what a PromQL expression selects of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_GOLDEN = "validation_latency|stale_context|escalation_count|resource_lock|token_budget|idempotency_hit"
_SELECTOR = re.compile(rf"\b((?:sds|{_GOLDEN})_\w+)(\{{[^}}]*\}})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of a scrape by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float | None:
    """Return the sample of this name that has these labels, with others or not; None: there is none. Several are added up."""
    found = [v for (n, has), v in samples(text).items() if n == name and has >= frozenset(labels.items())]
    return sum(found) if found else None


def scraped(bed: Any) -> str:
    answer = bed.client.get("/metrics")
    assert 200 == answer.status_code
    return str(answer.text)


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector of a PromQL expression: a metric's name, and its matchers (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def takes(self, sample: tuple[str, frozenset[tuple[str, str]]]) -> bool:
        """Tell whether it selects a sample. A label that a sample lacks is never selected, though it is empty to Prometheus."""
        name, has = sample[0], dict(sample[1])
        return name == self.name and all(_matches(has.get(label), how, what) for label, how, what in self.matchers)


def selectors(expr: str) -> list[Selector]:
    """Return the selectors of a PromQL expression over this program's metrics. Each value of `a|b` has a selector of its own."""
    found = list[Selector]()
    for name, within in _SELECTOR.findall(expr):
        matchers = [(label, how, what.split("|")) for label, how, what in _MATCHER.findall(within)]
        for chosen in itertools.product(*(values for _, _, values in matchers)):
            each = zip(matchers, chosen, strict=True)
            found.append(Selector(name, tuple((label, how, what) for (label, how, _), what in each)))
    return found


def _matches(has: str | None, how: str, what: str) -> bool:
    same = has is not None and re.fullmatch(what if "~" in how else re.escape(what), has) is not None
    return has is not None and same != how.startswith("!")

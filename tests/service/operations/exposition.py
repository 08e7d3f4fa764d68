"""Prometheus' text format, read back."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families


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

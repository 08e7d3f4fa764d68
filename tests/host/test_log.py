"""The log: JSON lines, and a log that cannot be written is nobody's problem but its own."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from sds.host.log import JsonLog
from sds.kernel.errors import StoreError


def test_a_line_is_one_json_object_with_its_level(tmp_path: Path) -> None:
    with closing(JsonLog(tmp_path / "log.jsonl")) as log:
        log.write("flow.decided", {"dfid": "d1"})
        log.write("security.injection_suspected", {"dfid": "d2"})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    assert [("flow.decided", "info"), ("security.injection_suspected", "warning")] == [
        (line["event"], line["level"]) for line in lines
    ]


def test_the_log_is_written_whatever_the_program_around_it_configures_for_its_own(tmp_path: Path) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), context_class=OrderedDict
    )
    try:
        with closing(JsonLog(tmp_path / "log.jsonl")) as log:
            log.write("flow.decided", {"dfid": "d1"})
            log.write("security.injection_suspected", {"dfid": "d2"})
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    assert ["d1", "d2"] == [line["dfid"] for line in lines]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_fails_no_decision() -> None:
    log = JsonLog(Path("/dev/full"))
    log.write("flow.decided", {"dfid": "d1"})
    log.close()


def test_a_closed_log_fails_no_decision(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl")
    log.close()
    log.write("flow.decided", {"dfid": "late"})

    assert "" == (tmp_path / "log.jsonl").read_text()


def test_a_log_that_cannot_be_opened_is_told_when_the_gate_is_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"` cannot be written: is a directory$"):
        JsonLog(tmp_path)

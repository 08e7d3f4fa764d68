"""deploy/haproxy.cfg and deploy/nginx.conf agree with each other and with the service that they stand before."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sds.definitions.registry import find
from sds.service.routes.described import DECIDE
from sds.service.settings import ServiceSettings
from sds.service.state import FORWARDED
from tests.service.testbed import Bed

ROOT = Path(__file__).parents[3]
HAPROXY = (ROOT / "deploy" / "haproxy.cfg").read_text(encoding="utf-8")
NGINX = (ROOT / "deploy" / "nginx.conf").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
SETTINGS = ServiceSettings(gates=("refund",))


def seconds(text: str, name: str) -> float:
    (found,) = re.findall(rf"^\s*{name} (\d+)s;?$", text, re.MULTILINE)
    return float(found)


def test_a_balancer_waits_longer_than_a_decision_takes_and_than_a_stream_is_silent() -> None:
    budgets = [find(name).load_contract().budget for name in ("refund", "fraud")]
    longest_s = max((each.ttl_ms + each.dispatch_ms_max) / 1_000 for each in budgets)
    for waits_s in (seconds(HAPROXY, "timeout server"), seconds(NGINX, "proxy_read_timeout")):
        assert waits_s > max(longest_s, SETTINGS.heartbeat_s)
    assert seconds(HAPROXY, "timeout client") > SETTINGS.heartbeat_s


def test_a_balancer_closes_a_silent_connection_before_the_service_does() -> None:
    assert SETTINGS.idle_s > seconds(NGINX, "keepalive_timeout")


def test_a_balancer_has_noticed_a_process_that_stops_before_it_drains() -> None:
    ((every_s, times),) = re.findall(r"check inter (\d+)s fall (\d+)", HAPROXY)
    (head_s,) = re.findall(r"--shutdown-delay-s (\d+)", HAPROXY)
    (page_s,) = re.findall(r"sds serve .*--host 10.*--shutdown-delay-s (\d+)", PAGE)
    assert int(every_s) * (1 + int(times)) < int(head_s) == int(page_s)


@pytest.mark.parametrize(
    "pattern",
    [
        re.findall(r"acl asks_for_decision path_reg (\S+)", HAPROXY)[0],
        re.findall(r"location ~ (\S+) \{[^}]*non_idempotent", NGINX)[0],
    ],
    ids=["haproxy", "nginx"],
)
def test_a_balancer_sends_only_what_asks_for_a_decision_twice(bed: Bed, pattern: str) -> None:
    every = [
        path for path, does in bed.client.get("/openapi.json").json()["paths"].items() if {"post", "put"} & {*does}
    ]
    assert [DECIDE.replace("{gate}", "toll")] == [path for path in every if re.search(pattern, path)]
    assert len(every) > 3


def test_what_is_checked_is_whether_a_service_is_ready(bed: Bed) -> None:
    assert ["GET /readyz"] == re.findall(r"option httpchk (.+)", HAPROXY)
    assert bed.client.get("/readyz").status_code in (200, 503)


def test_a_balancer_says_that_it_is_there() -> None:
    """Else the console's cookie is not Secure before a service on the same machine, and --metrics-open opens the metrics."""
    sent = {name.lower() for name in re.findall(r"proxy_set_header (X-\S+)", NGINX)}
    assert sent == {"x-forwarded-for", "x-forwarded-proto"} < set(FORWARDED)
    assert "option forwardfor" in HAPROXY
    assert "http-request set-header X-Forwarded-Proto https" in HAPROXY


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_takes_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(re.sub(r" ssl crt \S+", "", HAPROXY))
    done = subprocess.run(["haproxy", "-c", "-f", path], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "nginx.conf"
    plain = re.sub(r"\n +ssl_certificate.*", "", NGINX.replace("443 ssl", "8443"))
    path.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{plain}}}\n")
    command = ["nginx", "-t", "-q", "-c", path, "-g", f"error_log {tmp_path}/log;"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr

"""`sds webhooks`: endpoints are added, listed with what is undelivered, and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.service.database import open_database
from sds.service.operations.endpoints import endpoints, positions, write_failure
from tests.cli.conftest import Cli

"""Without the extra `service` a command of it says how to get it; no other command loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sds.cli.service import needs_service
from sds.kernel.errors import UsageError


def test_what_is_missing_is_said_with_the_command_that_installs_it() -> None:
    with pytest.raises(UsageError, match="the service needs `fastapi`") as refused, needs_service():
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
    assert (
        "`make install` in the source folder; elsewhere pip install 'PATH_TO_THAT_FOLDER[service]'"
        == refused.value.hint
    )


@pytest.mark.parametrize(
    "words",
    [["keys", "add", "shop", "--role", "read", "--gate", "all"], ["keys", "list"], ["webhooks", "list"]],
    ids=" ".join,
)
def test_a_part_of_the_extra_that_is_missing_is_said_by_every_command_of_the_service(
    words: list[str], tmp_path: Path
) -> None:
    """Where SQLAlchemy is there for another program, and FastAPI is not."""
    code = f"import sys; sys.modules['fastapi'] = None; from sds.cli import app; sys.exit(app._run({words}))"
    environment = {**os.environ, "SDS_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (2, "error: the service needs `fastapi`") == (done.returncode, done.stderr.splitlines()[0])


def test_a_module_of_a_package_that_is_there_is_not_said_to_be_an_extra() -> None:
    error = ModuleNotFoundError("No module named 'fastapi.sse'", name="fastapi.sse")
    with pytest.raises(ModuleNotFoundError) as said, needs_service():
        raise error
    assert error is said.value


LOADED = """
import sys, typer
from sds.cli.app import app
groups = [typer.main.get_command(app)]
for group in groups:
    groups += [each for each in group.commands.values() if hasattr(each, "commands")]
assert {"sds.cli.service.serve", "sds.cli.service.keys", "sds.cli.setup.contracts"} <= sys.modules.keys()
print({"fastapi", "uvicorn", "sqlalchemy", "alembic", "psycopg"} & sys.modules.keys())
"""


def test_no_command_loads_it_before_it_runs() -> None:
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "set()" == said.strip()

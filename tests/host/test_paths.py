"""Where a gate keeps its files: a private folder, and a key that nobody ever sees half written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sds.host import paths
from sds.host.keys import KEY_BYTES
from sds.host.paths import kernel_keys, make_private, signer
from sds.kernel.errors import StoreError, UsageError
from sds.models.protocol import extra_hint

DATA = b"what is signed"
ROOT = Path(__file__).parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_is_made_once_in_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "gate"
    first, second = signer(folder), signer(folder)

    assert first.sign(DATA) == second.sign(DATA)
    assert (0o700, 0o600) == (mode(folder), mode(folder / "kernel.key"))
    assert ["kernel.key"] == [file.name for file in folder.iterdir()]
    assert [KEY_BYTES] == [len(key) for key in kernel_keys(folder)]


def test_what_a_private_folder_lies_in_is_private_where_it_is_made_too(tmp_path: Path) -> None:
    """Whoever may write in the home can put another record in the place of one that they cannot read."""
    before = os.umask(0)
    try:
        make_private(tmp_path / "home" / "gate")
    finally:
        os.umask(before)

    assert [0o700, 0o700] == [mode(tmp_path / "home"), mode(tmp_path / "home" / "gate")]


def test_threads_that_come_first_at_once_get_one_key_and_never_see_half_of_it(tmp_path: Path) -> None:
    for turn in range(20):
        folder, start, seen = tmp_path / str(turn), threading.Barrier(8), list[str]()

        def first(folder: Path = folder, start: threading.Barrier = start, seen: list[str] = seen) -> None:
            start.wait()
            seen.append(signer(folder).sign(DATA))

        threads = [threading.Thread(target=first) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (8, 1) == (len(seen), len(set(seen)))


@pytest.mark.parametrize("size", [0, KEY_BYTES - 1])
def test_a_key_that_was_cut_short_is_told_in_one_line_with_a_hint(tmp_path: Path, size: int) -> None:
    path = tmp_path / "kernel.key"
    path.write_bytes(b"k" * size)
    path.chmod(0o600)
    with pytest.raises(StoreError) as caught:
        signer(tmp_path)

    assert f"`{path}` is damaged: it has {size} bytes, but a key has 32" == str(caught.value)
    assert caught.value.hint.startswith("restore the key from a backup")
    assert size == path.stat().st_size


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    signer(tmp_path)
    (tmp_path / "kernel.key").chmod(0o640)
    with pytest.raises(UsageError, match="other users can read"):
        signer(tmp_path)


def test_a_folder_that_is_there_keeps_its_mode_and_a_file_in_its_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private(tmp_path / "shared")
    (tmp_path / "file").touch()

    assert 0o755 == mode(tmp_path / "shared")
    with pytest.raises(StoreError, match="file` cannot be created: file exists"):
        make_private(tmp_path / "file")


@pytest.mark.parametrize(
    ("psycopg", "said"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'psycopg'\", name='psycopg')",
            f"a record in PostgreSQL needs packages that are not installed {extra_hint('service')}",
        ),
        (
            "raise ImportError('no pq wrapper available.\\nAttempts made:')",
            "the PostgreSQL store cannot be imported: no pq wrapper available. Attempts made:",
        ),
        (
            "import psycopg.adapted",
            "the PostgreSQL store cannot be imported: No module named 'psycopg.adapted'",
        ),
    ],
)
def test_only_a_package_that_is_missing_is_said_to_be_not_installed(tmp_path: Path, psycopg: str, said: str) -> None:
    (tmp_path / "psycopg").mkdir()
    (tmp_path / "psycopg" / "__init__.py").write_text(psycopg)
    code = (
        "from sds.host.paths import has_record, home\nfrom sds.kernel.errors import SdsError\n"
        "try: has_record(home())\nexcept SdsError as error: print(error, error.hint)"
    )
    environment = os.environ | {
        "SDS_STORE": "postgresql://nobody@localhost/none",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said == done.stdout.strip()


def test_a_home_that_cannot_be_looked_into_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user, in which the record may be: `no record` would be said of what nobody has seen."""
    too_long = "x" * 300
    monkeypatch.setenv("SDS_HOME", too_long)
    looks = (paths.has_record, paths.look_at_record, paths.open_record, paths.refuse_lost, paths.public_keys_of)
    for look in looks:
        with pytest.raises(StoreError, match=f"`{too_long}/refund/.*` cannot be accessed: file name too long"):
            look(paths.gate_home("refund"))
    with pytest.raises(StoreError, match="cannot be accessed"):
        paths.fitted_readers("refund", None)

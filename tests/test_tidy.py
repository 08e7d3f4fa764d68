"""That `tests.tidy` finds what it looks for: one planted fault of each kind, and none in a tree that keeps to the limits."""

from __future__ import annotations

import pytest

from sds.models.catalog.backends import BACKENDS
from tests import tidy
from tests.tidy import Source

LONG = Source("sds/long.py", "x = 1\n" * 11)


def test_a_long_file_is_found_unless_it_is_known_and_a_known_one_may_not_grow() -> None:
    assert ["sds/long.py: 11 lines, over 10"] == list(tidy.long_files([LONG], 10, {}))
    assert [] == list(tidy.long_files([LONG], 10, {"sds/long.py": 11}))
    assert ["sds/long.py: 11 lines, over 10"] == list(tidy.long_files([LONG], 5, {"sds/long.py": 10}))


def test_an_exception_that_is_no_longer_needed_is_a_fault() -> None:
    (fault,) = tidy.long_files([LONG], 10, {"sds/long.py": 20})
    assert fault.startswith("sds/long.py: no longer 20 lines")


def test_a_full_folder_and_a_long_function_are_found() -> None:
    files = [Source(f"sds/full/m{n}.py", "") for n in range(3)] + [Source("sds/full/__init__.py", "")]
    assert ["sds/full: 3 modules, over 2"] == list(tidy.full_folders(files, 2, {}))
    body = Source("sds/f.py", "def f():\n" + "    pass\n" * 5)
    assert ["sds/f.py:f: 6 lines, over 5"] == list(tidy.long_functions([body], 5, {}))


@pytest.mark.parametrize(
    "code",
    ["from sds.other import _own\n", "from sds import other\nother._own()\n", "from sds import other as o\no._own\n"],
)
def test_a_private_name_of_another_module_is_found(code: str) -> None:
    (fault,) = tidy.private_names([Source("sds/a.py", code)])
    assert "_own" in fault


def test_two_public_classes_of_one_name_are_found_in_one_package_only() -> None:
    one, two = (Source(f"sds/{name}.py", "class Same: ...\nclass _Own: ...\n") for name in "ab")
    assert ["class Same: in sds/a.py and sds/b.py"] == list(tidy.twin_classes([one, two]))
    assert [] == list(tidy.twin_classes([one, Source("models/a.py", "class Same: ...\n")]))


def test_a_backends_name_is_found_outside_its_folder_but_not_in_a_docstring() -> None:
    names = {"openvino": "models/openvino_/"}
    found = list(tidy.backend_names([Source("sds/a.py", '"""openvino"""\nx = "openvino"\n')], names, []))
    assert ['sds/a.py:2: "openvino" is named in models/openvino_/ and the factory only'] == found
    assert [] == list(tidy.backend_names([Source("models/openvino_/facts.py", 'x = "openvino"\n')], names, []))


def test_a_backend_is_known_by_the_facts_of_its_own_folder() -> None:
    facts = Source("models/new_/facts.py", 'NEW = BackendFacts(name="new", title="New")\n')
    assert {"new": "models/new_/"} == tidy.backend_folders([facts, Source("sds/a.py", 'BackendFacts(name="x")\n')])
    known = tidy.backend_folders(tidy.sources(tidy.ROOT, ("models",)))
    assert set(BACKENDS) == set(known)


@pytest.mark.parametrize("code", ["my_seat = 1\n", "# a seat\n", '"""A seat."""\n', "SEAT = 1\n"])
def test_a_banned_word_is_found_in_names_comments_and_docstrings(code: str) -> None:
    assert 1 == len(list(tidy.banned_words([Source("sds/a.py", code)], ["seat"], ["x y"])))


def test_a_word_that_no_message_says_is_found_in_texts_of_several_words_only() -> None:
    code = 'raise E(f"{n} orders in the air")\nKEY = "in_the_air"\nx = "told that"\n'
    found = list(tidy.banned_words([Source("sds/a.py", code)], ["told", "in the air"], ["in the air", "in_the_air"]))
    assert ["sds/a.py:1: `in the air`"] == found


@pytest.mark.parametrize("code", ['x = "seat"\n', "seated = 1\n", "reseat = 1\n"])
def test_a_stored_text_and_another_word_are_no_banned_word(code: str) -> None:
    assert [] == list(tidy.banned_words([Source("sds/a.py", code)], ["seat"], ["seat"]))


def test_what_nothing_uses_is_found() -> None:
    idle = Source("sds/a.py", "def idle() -> None: ...\n")
    assert ["sds/a.py:idle: nothing outside tests uses it"] == list(tidy.unreached([idle], []))
    assert [] == list(tidy.unreached([idle, Source("sds/b.py", "idle()\n")], []))
    assert ["sds/gone.py:f: no such exception is needed"] == list(tidy.unreached([], ["sds/gone.py:f"]))


def test_a_budget_that_is_exceeded_is_found_the_cores_too() -> None:
    faults = list(tidy.over_budget([LONG], {"sds": 10}, ["sds/long.py"], 5))
    assert ["sds: 11 lines, over its budget of 10", "core: 11 lines, over its budget of 5"] == faults

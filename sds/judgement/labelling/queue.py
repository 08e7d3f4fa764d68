"""The cases that a person is asked to label, unlabelled ones only and the least certain first; and the file of answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sds.definitions.definition import LabelledCase
from sds.host.paths import make_private
from sds.judgement.judging import Readings
from sds.judgement.labels import NO, YES, label_line, read_labels, whole_fields
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import UsageError, cause_of
from sds.kernel.storage.private_files import make_private_file
from sds.models.readers.protocol import Reader
from sds.policy.distribution import SCORE
from sds.policy.readers import as_read

KEYS = "123456789abcdefghijklmnoprtvwxyz"  # one for each value; s, q and u have other meanings
SKIP, QUIT, UNDO = "s", "q", "u"
_PLACE = "name a file that can be written with --out; without it, $SDS_HOME must be writable"
ASKED_MAX = 2_000  # different cases that are taken from a long queue


@dataclass(frozen=True, slots=True)
class Asked:
    """A case to label. `state`: reads its fields, {} where it has none. `shares`: a reader's probabilities, if there is one."""

    text: str
    state: Callable[[], Fields]
    shares: Mapping[str, float] | None = None


def values_of(contract: Contract, reading: str) -> dict[str, str]:
    """Return the possible answers about a reading, each with its meaning. Raises UsageError for an unknown reading."""
    spec = contract.readings.get(reading)
    if spec is None:
        raise UsageError(f"there is no reading `{reading[:64]}`", hint=f"choose one of: {', '.join(contract.readings)}")
    return dict(spec.values) or {YES: "yes", NO: "no"}


def unlabelled(contract: Contract, reading: str, cases: Iterable[Asked], known: Sequence[LabelledCase]) -> list[Asked]:
    """Return the different cases without a label for this reading: different texts for an enumeration, states for a score."""
    of_text, rules = bool(contract.readings[reading].values), Rules(contract)

    def key(text: str, fields: Fields) -> object:
        return as_read(contract, text) if of_text else (as_read(contract, text), tuple(sorted(fields.items())))

    seen = {key(case.text, case.fields) for case in known if reading in case.readings}
    found = list[Asked]()
    for case in cases:
        fields = {} if of_text else whole_fields(rules, case.state())
        known_by = key(case.text, fields)
        if known_by in seen or not (known_by if of_text else fields):
            continue
        seen.add(known_by)
        found.append(case)
        if len(found) == ASKED_MAX:
            break
    return found


def least_certain_first(
    contract: Contract, reading: str, cases: Sequence[Asked], readers: Mapping[str, Reader]
) -> list[Asked]:
    """Return the cases by a fitted reader's certainty, unfamiliar ones first; in the given order without a reader."""
    if reading not in readers:
        return list(cases)
    readings, found = Readings(contract, readers), list[tuple[bool, float, int, Asked]]()
    for place, case in enumerate(cases):
        if contract.readings[reading].values:
            read = readings.of_text(reading, case.text)
        else:
            read = readings.of_case(LabelledCase(case.text, case.state(), {}))[reading]
        shares = read.probabilities
        certain = abs(shares[SCORE] - 0.5) if SCORE in shares else max(shares.values())
        found.append((read.familiar, certain, place, replace(case, shares=shares)))
    return [case for *_, case in sorted(found, key=lambda each: each[:3])]


class LabelFile:
    """A file of labels. Each answer is one line, which is on disk before the next question.

    Raises StoreError or UsageError, before the first question, where the file cannot be written.
    """

    def __init__(self, contract: Contract, path: Path) -> None:
        self._contract, self._path, self._rules = contract, path, Rules(contract)
        self._ends = list[int]()  # the size of the file before each line of this session
        try:
            if path.is_dir():
                raise UsageError(f"`{path}` is a folder", hint=_PLACE)
            if not path.exists():
                make_private(path.parent, hint=_PLACE)
                make_private_file(path)
        except OSError as error:
            raise UsageError(f"`{path}` cannot be written: {cause_of(error)}", hint=_PLACE) from error

    def known(self) -> list[LabelledCase]:
        return read_labels(self._contract, self._path) if self._path.stat().st_size else []

    def add(self, case: LabelledCase) -> None:
        kept = replace(case, fields=whole_fields(self._rules, case.fields))
        with self._path.open("ab") as file:
            self._ends.append(file.tell())
            if file.tell() and not self._ended():
                file.write(b"\n")
            file.write(label_line(kept, self._contract.gate).encode())
            file.flush()
            os.fsync(file.fileno())

    def undo(self) -> bool:
        """Remove the last label of this session; return False where there is none."""
        if not self._ends:
            return False
        with self._path.open("r+b") as file:
            file.truncate(self._ends.pop())
            os.fsync(file.fileno())
        return True

    def _ended(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


@dataclass
class Session:
    """One session of labelling. `answers`: the meaning of each key; `tell`: shows a case and the position in the queue."""

    file: LabelFile
    reading: str
    answers: Mapping[str, str]
    tell: Callable[[Asked, int, int], None]
    key: Callable[[], str]

    def walk(self, cases: Sequence[Asked]) -> int:
        """Ask about one case after the other until all are labelled or the person quits; return how many were labelled."""
        place, labelled = 0, list[int]()
        while place < len(cases):
            self.tell(cases[place], place + 1, len(cases))
            key = self._key()
            if key == QUIT:
                break
            if key == UNDO:
                if self.file.undo():
                    place = labelled.pop()
                continue
            if key != SKIP:
                self.file.add(self._label(cases[place], self.answers[key]))
                labelled.append(place)
            place += 1
        return len(labelled)

    def _key(self) -> str:
        while True:
            key = self.key().lower()
            if key in self.answers or key in (SKIP, QUIT, UNDO):
                return key

    def _label(self, case: Asked, value: str) -> LabelledCase:
        return LabelledCase(case.text, case.state(), {self.reading: value})

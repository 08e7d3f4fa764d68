"""Labels: one JSON object a line, read strictly; and their division into parts.

    {"text": "...", "readings": {"cause": "weather"}, "fields": {...}, "decision": "DENY", "style": "plain", "part": "test"}

A reading may stand beside the text under its own name (`"cause": "weather"`). Cases without a `part` are divided by a
hash of their text, separately for each value, so that no text is both learned and tested.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sds.definitions.definition import LabelledCase
from sds.host.input_files import read_bytes
from sds.kernel.canonical import digest, no_number, one_line, unaccented
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.flow.intake import EVENT_BYTES_MAX, once
from sds.policy.readers import as_read

FILE_BYTES_MAX = 256 << 20
TEXT_CHARS_MAX = EVENT_BYTES_MAX  # no event's text is longer
PARTS = ("train", "calibrate", "test")
SHARES = (0.5, 0.75)  # of the texts of a value: the ends of the first and the second part
YES, NO = "1", "0"  # the labels of a score
_KEYS = frozenset({"gate", "text", "fields", "readings", "decision", "style", "part", "amount_minor"})
_BOM = b"\xef\xbb\xbf"  # which some programs write at the beginning of UTF-8
_NAMELESS = "value"  # another name for the only enumeration of a contract
_OF_SCORE = {True: YES, False: NO, "1": YES, "0": NO}


def read_labels(contract: Contract, path: Path) -> list[LabelledCase]:
    """Return the labels of a file, or of a folder with train.jsonl, calibrate.jsonl and test.jsonl.

    Raises UsageError with file and line.
    """
    files = [path / f"{part}.jsonl" for part in PARTS] if path.is_dir() else [path]
    found = parse_labels(contract, ((str(file), _read(file)) for file in files))
    if not found:
        raise UsageError(f"`{path}` does not hold any label", hint=_form(contract))
    return found


def parse_labels(contract: Contract, files: Iterable[tuple[str, bytes]]) -> list[LabelledCase]:
    """Return the labels of files, given as (name, bytes). A file named after a part belongs to that part.

    Raises UsageError with name and line, also for contradicting labels of one case.
    """
    lines, found = _Lines(contract), list[LabelledCase]()
    for name, raw in files:
        found += lines.cases(raw, name, Path(name).stem if Path(name).stem in PARTS else "")
    return found


def with_lost_letters(contract: Contract, cases: Iterable[LabelledCase]) -> list[LabelledCase]:
    """Return the cases of whose texts a reader does not see every letter: one that is not Latin is read as a blank."""
    most = contract.event.evidence_chars_max
    return [case for case in cases if not all(c.isascii() or not c.isalpha() for c in unaccented(case.text[:most]))]


def label_line(case: LabelledCase, gate: str) -> str:
    """Return a case as a line of a file; `read_labels` reads it back."""
    said: dict[str, Any] = {
        "gate": gate,
        "text": case.text,
        "fields": dict(case.fields),
        "readings": dict(case.readings),
    }
    said |= {"decision": case.decision, "style": case.style, "amount_minor": case.amount_minor, "part": case.part}
    return json.dumps({name: value for name, value in said.items() if value or name in ("gate", "text")}) + "\n"


def whole_fields(rules: Rules, fields: Fields) -> Fields:
    """Return the fields that the contract declares; {} where one is missing or mistyped: a label has all fields or none."""
    return {} if rules.faults(fields) else {path: fields[path] for path in rules.contract.snapshot}


def parted(contract: Contract, cases: Iterable[LabelledCase]) -> list[LabelledCase]:
    """Return the cases, each with its part: the given one, else one by a hash of its text, stratified by value."""
    given, strata = list(cases), defaultdict[str, set[str]](set)
    for case in given:
        if not case.part:
            strata[_stratum(contract, case)].add(_hash(contract, case))
    placed = {each: part for hashes in strata.values() for each, part in _place(sorted(hashes))}
    return [case if case.part else replace(case, part=placed[_hash(contract, case)]) for case in given]


def _place(hashes: Sequence[str]) -> Iterable[tuple[str, str]]:
    for place, each in enumerate(hashes):
        share = (place + 0.5) / len(hashes)
        yield each, PARTS[sum(share > end for end in SHARES)]


def _stratum(contract: Contract, case: LabelledCase) -> str:
    values = [case.readings.get(name, "") for name in contract.readings]
    return "|".join(values) if any(values) else case.decision or ""


def _hash(contract: Contract, case: LabelledCase) -> str:
    """Return the hash that divides cases: of the text as it is read, or of the fields of a case without text."""
    return digest(as_read(contract, case.text) or dict(case.fields))


def labels_hash(cases: Iterable[LabelledCase]) -> str:
    """Return the SHA-256 of everything in the labels but their parts."""
    return digest([
        [case.text, dict(case.fields), dict(case.readings), case.decision, case.style, case.amount_minor]
        for case in cases
    ])  # fmt: skip


def split_hash(cases: Iterable[LabelledCase]) -> str:
    """Return the SHA-256 of the division of cases into parts."""
    return digest([[digest([case.text, dict(case.fields)]), case.part] for case in cases])


def _read(path: Path) -> bytes:
    return read_bytes(path, FILE_BYTES_MAX, hint="name a file of labels with --labels: one JSON object a line")


def _form(contract: Contract) -> str:
    named = ", ".join(f'"{name}": "{next(iter(spec.values), YES)}"' for name, spec in contract.readings.items())
    return f'write each label as one line: {{"text": "...", "readings": {{{named}}}}}'


class _Lines:
    """Reads the lines of several files, and refuses repetitions and contradictions among them."""

    def __init__(self, contract: Contract) -> None:
        self._contract, self._rules = contract, Rules(contract)
        self._enumerations = [name for name, spec in contract.readings.items() if spec.values]
        self._seen = dict[object, tuple[str, str]]()  # what was labelled -> (its value, where)

    def cases(self, raw: bytes, name: str, part: str) -> list[LabelledCase]:
        found = list[LabelledCase]()
        for number, line in enumerate(raw.removeprefix(_BOM).split(b"\n"), 1):
            if line.strip():
                where = f"{name}:{number}"
                try:
                    found.append(self._case(line, where, part))
                except SdsError as error:
                    raise UsageError(f"{where}: {error}", hint=error.hint or _form(self._contract)) from error
        return found

    def _case(self, line: bytes, where: str, part: str) -> LabelledCase:
        data = _parse_object(line)
        said = dict[str, object](_mapping(data, "readings"))
        for name in data.keys() - _KEYS:
            said[self._reading(name)] = data[name]
        case = LabelledCase(
            text=_text(data),
            fields=self._fields(_mapping(data, "fields")),
            readings={self._reading(name): self._value(name, value) for name, value in said.items()},
            decision=self._decision(data.get("decision")),
            style=str(data.get("style", "")),
            amount_minor=_amount(data.get("amount_minor", 0)),
            part=_part(data.get("part", part)),
        )
        self._refuse_other_gate(data.get("gate"))
        self._refuse_empty(case)
        self._refuse_repeated(case, where)
        return case

    def _reading(self, name: str) -> str:
        if name == _NAMELESS and name not in self._contract.readings and len(self._enumerations) == 1:
            return self._enumerations[0]
        if name not in self._contract.readings:
            known = ", ".join(self._contract.readings)
            raise UsageError(
                f"`{one_line(name, 64)}` is not a reading of gate `{self._contract.gate}`",
                hint=f"its readings are: {known or 'none'}; check that the label is for this gate",
            )
        return name

    def _value(self, name: str, value: object) -> str:
        values = self._contract.readings[self._reading(name)].values
        if not values:
            known = _OF_SCORE.get(value) if isinstance(value, bool | str) or value in (0, 1) else None
            if known is None:
                raise UsageError(f"`{one_line(value, 64)}` is not a label of the score `{name}`", hint="write 1 or 0")
            return str(known)
        if value is None:
            raise UsageError(f"`{name}` has no value", hint="give it one, or leave it out")
        if not isinstance(value, str) or value not in values:
            raise UsageError(
                f"`{one_line(value, 64)}` is not a value of `{name}`", hint=f"choose one of: {', '.join(values)}"
            )
        return value

    def _decision(self, kind: object) -> str | None:
        known = (*self._contract.kinds, ESCALATE)
        if kind is not None and kind not in known:
            raise UsageError(
                f"`{one_line(kind, 64)}` is not a kind of decision", hint=f"choose one of: {', '.join(known)}"
            )
        return None if kind is None else str(kind)

    def _fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if strange := sorted(fields.keys() - self._contract.snapshot.keys()):
            raise UsageError(
                f"`{one_line(strange[0], 64)}` is not a field of the contract's snapshot", hint="leave it out"
            )
        if fields and (wrong := self._rules.faults(fields)):
            raise UsageError(f"the field {wrong[0]}", hint="give all fields of the snapshot as they were read, or none")
        return fields

    def _refuse_other_gate(self, gate: object) -> None:
        if gate not in (None, self._contract.gate):
            raise UsageError(
                f"this is a label of gate `{one_line(gate, 64)}`, not `{self._contract.gate}`",
                hint="use the labels of this gate, or name the other gate",
            )

    def _refuse_empty(self, case: LabelledCase) -> None:
        if not case.readings and case.decision is None:
            raise UsageError("the label has neither a reading nor a decision")
        read = [name for name in case.readings if name in self._enumerations]
        if read and not case.text.strip():
            raise UsageError(f"`{read[0]}` is read from the text, and the text is empty", hint="leave the line out")
        if read and not as_read(self._contract, case.text):
            raise UsageError(
                f"`{read[0]}` is read from the text, which has no printable ASCII",
                hint="leave the reading out, or write the text in Latin letters: a reader gets only printable ASCII",
            )

    def _refuse_repeated(self, case: LabelledCase, where: str) -> None:
        """Raise UsageError for a second label of the same case, and for two values of the same text."""
        text, fields = as_read(self._contract, case.text), digest(dict(case.fields))
        said = {**case.readings, **({"decision": case.decision} if case.decision else {})}
        for name, value in said.items():
            of_text = name in self._enumerations
            before, there = self._seen.setdefault((name, text if of_text else (text, fields)), (value, where))
            if before != value:
                raise UsageError(
                    f"{there} says `{before}` for the same {'text' if of_text else 'case'}", hint="keep one of the two"
                )
        _, there = self._seen.setdefault((tuple(said), text, fields), ("", where))
        if there != where:
            raise UsageError(f"{there} labels the same case", hint="keep one of the two")


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=once, parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 at byte {error.start} of the line", hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {one_line(error, 120)}") from error
    if not isinstance(data, dict):
        raise UsageError("not a JSON object")
    return data


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"`{name}` is not a JSON object")
    return found


def _text(data: Mapping[str, Any]) -> str:
    text = data.get("text")
    if not isinstance(text, str):
        raise UsageError("`text` is missing, or is not a string")
    if len(text) > TEXT_CHARS_MAX:
        raise UsageError(f"the text has {len(text)} characters, more than {TEXT_CHARS_MAX}", hint="shorten it")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError("the text has half a character, which UTF-8 cannot hold", hint="write the text again")
    return text


def _amount(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise UsageError("`amount_minor` is not an amount in minor units", hint="write a whole number, 0 or more")
    return value


def _part(value: object) -> str:
    if value not in ("", *PARTS):
        raise UsageError(
            f"`{one_line(value, 64)}` is not a part", hint=f"choose one of: {', '.join(PARTS)}, or leave it out"
        )
    return str(value)

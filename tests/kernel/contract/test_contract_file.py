"""A contract is read from a file that nobody else can write, as it was released, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sds.kernel.canonical import sha256_hex
from sds.kernel.contract.schema import Contract, load_contract, parse_contract
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, load_with_lines
from sds.kernel.errors import ContractError
from tests.kernel import world

REFUND = Path(__file__).parents[3] / "sds" / "gates" / "refund" / "contract.yaml"


def test_the_refund_gates_contract_is_loaded():
    contract = load_contract(REFUND)
    assert ("refund", "tickets") == (contract.gate, contract.source)
    assert {"COMPENSATE", "REFUND_TICKET", "VOUCHER", "DENY"} == set(contract.authority)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "till.yaml"
    path.write_text(world.CONTRACT)
    path.chmod(0o644)
    return path


def test_a_contract_is_loaded_with_the_checksum_it_was_released_with(file: Path):
    checksum = sha256_hex(file.read_bytes())
    assert isinstance(load_contract(file, checksum=checksum), Contract)
    file.write_text(world.edited(("hi: 3", "hi: 4")))
    with pytest.raises(ContractError) as caught:
        load_contract(file, checksum=checksum)
    assert f"{file}: the checksum differs from the one it was released with" == str(caught.value)
    assert caught.value.hint.startswith("fetch the file again from where it was released")
    assert "CONTRACT_TAMPERED" == caught.value.reason_code


def test_a_contract_that_anyone_can_write_is_not_trusted(file: Path):
    file.chmod(0o646)
    with pytest.raises(ContractError) as caught:
        load_contract(file)
    assert f"{file}: anyone can write this file" == str(caught.value)
    assert f"chmod o-w {file}" == caught.value.hint


CONTROLS = {
    r"\x07": "U+0007",
    r"\e[2J": "U+001B",
    r"\0": "U+0000",
    r"\r": "U+000D",
    r"\x7f": "U+007F",
    r"\u009b": "U+009B",
    r"\u200f": "U+200F",
    r"\u2028": "U+2028",
    r"\u202e": "U+202E",
    r"\u2066": "U+2066",
}


@pytest.mark.parametrize(("escape", "code"), CONTROLS.items())
def test_what_controls_a_terminal_or_turns_a_text_is_refused_with_its_line(escape: str, code: str):
    text = world.edited(("Decide who is paid.", f'"Decide {escape} who is paid."'))
    wanted = f"till.yaml:6: the character {code} is not allowed: it controls a terminal or turns the text"
    with pytest.raises(ContractError) as caught:
        load_with_lines(text, "till.yaml")
    assert wanted == str(caught.value)
    for wrong in (("gate: till", "gate: Till"), ("when: claim.due", "when: claim.")):  # the message is about the first
        with pytest.raises(ContractError) as caught:
            parse_contract(text.replace(*wrong), "till.yaml")
        assert wanted == str(caught.value)


@pytest.mark.parametrize("char", ["\x85", "\u061c", "\u200e", "\u202e", "\u2069"])
def test_a_comment_cannot_turn_the_text_around_it(char: str):
    with pytest.raises(ContractError, match=r"till\.yaml:3: the character U"):
        load_with_lines(f"gate: till\r\n# fine\r\n# {char}", "till.yaml")


def test_texts_in_any_script_and_of_several_lines_are_read_as_they_are():
    text = 'a: "ça va ?\\tبحر 👩\u200d🚀\\nتم"\r\nb: |\r\n  one\r\n  two\r\n'
    assert {"a": "ça va ?\tبحر 👩\u200d🚀\nتم", "b": "one\ntwo\n"} == load_with_lines(text, "till.yaml")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"a\\U00110000"', "till.yaml:2: not YAML: a number in it is too large"),
        ('"\\UFFFFFFFF"', "till.yaml:2: not YAML: a number in it is too large"),
        ('"\\ud83d\\ude00"', "till.yaml:2: a: holds half a character: \\ud800 to \\udfff are no characters"),
        ('{"b\\e": c}', "till.yaml:2: a key has a character that cannot be printed"),
        ('{"b\\nc": d}', "till.yaml:2: a key has a character that cannot be printed"),
    ],
)
def test_what_no_text_or_name_can_hold_is_refused_in_one_line(text: str, said: str):
    for controls in (False, True):
        with pytest.raises(ContractError) as caught:
            load_with_lines(f"\na: {text}", "till.yaml", controls=controls)
        assert said == str(caught.value)


def test_what_is_not_yaml_is_said_with_what_to_look_for():
    with pytest.raises(ContractError) as caught:
        load_with_lines("a:\n\tb: 1", "till.yaml")
    assert "till.yaml:2: not YAML: found character '\\t' that cannot start any token" == str(caught.value)
    assert "indent with spaces" in caught.value.hint


def test_a_version_of_yaml_that_is_no_number_of_this_machine_is_refused_in_one_line():
    with pytest.raises(ContractError, match=r"till\.yaml:1: not YAML: a number in it is too large"):
        load_with_lines(f"%YAML 1.{'9' * 5000}\n--- a", "till.yaml")


def test_the_file_that_is_checked_is_the_file_that_is_read(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of anyone's that takes the name just after the check is not what is loaded."""
    forged, real = tmp_path / "forged", os.fstat
    forged.write_text("gate: forged")

    def swap_after(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        if forged.exists():
            forged.replace(file)
        return found

    whole = load_contract(file)
    monkeypatch.setattr(os, "fstat", swap_after)
    assert whole == load_contract(file)
    assert "gate: forged" == file.read_text()


def test_what_cannot_be_read_as_a_contract_file_is_said_in_one_line(tmp_path: Path, file: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"gate: caf\xe9")
    (tmp_path / "large").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    messages = {
        "absent": "cannot be read: no such file or directory",
        ".": "not a regular file",
        "pipe": "not a regular file",
        "latin": "not UTF-8 at byte 9",
        "large": f"larger than {FILE_BYTES_MAX} bytes",
    }
    for name, message in messages.items():
        with pytest.raises(ContractError) as caught:
            load_contract(tmp_path / name)
        assert f"{tmp_path / name}: {message}" == str(caught.value)


@pytest.mark.parametrize("written", ["NO", "ON", "OFF", "YES", "no", "True", "12"])
@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("reasons: [NOT_OWED]", "reasons: [{}]", "kinds.DENY.reasons.0"),
        ("authority: [PAY, GRANT, TALK, DENY]", "authority: [PAY, {}]", "authority.1"),
        ("agent_id: till-agent", "agent_id: {}", "agent_id"),
        ("owner: till@shop.example", "owner: {}", "owner"),
        ("claim.due: bool", "claim.due: {}", "snapshot.claim.due"),
        ("key: account_id", "key: {}", "event.key"),
        ("spends: amount", "spends: {}", "kinds.PAY.spends"),
        ("when: claim.due", "show: {{claim.due: {}}}\nwhen: claim.due", "show.claim.due"),
        ("when: claim.due", "levels: {{claim.minutes: [{}, 5, long]}}\nwhen: claim.due", "levels.claim.minutes.0"),
        ("when: claim.due", "labels: {{claim.due: {}}}\nwhen: claim.due", "labels.claim.due"),
    ],
)
def test_a_word_that_yaml_reads_as_something_else_is_told_how_to_be_written(
    written: str, old: str, new: str, field: str
):
    assert old in world.CONTRACT
    text = world.CONTRACT.replace(old, new.format(written), 1)
    read = "a number" if written == "12" else "a truth value"
    line = text[: text.index(new.format(written).split("\n")[0])].count("\n") + 1
    with pytest.raises(ContractError) as caught:
        parse_contract(text, "till.yaml")
    assert f'till.yaml:{line}: {field}: must be text: YAML reads `{written}` as {read}: write "{written}"' == str(
        caught.value
    )


@pytest.mark.parametrize("written", ["1_000", "1.5", "null", "~", "0x10", "1:30"])
def test_what_has_no_plain_reading_is_refused_with_its_field_and_its_mend(written: str):
    text = world.CONTRACT.replace("reasons: [NOT_OWED]", f"reasons: [{written}]", 1)
    with pytest.raises(ContractError) as caught:
        parse_contract(text, "till.yaml")
    whole = "numbers are whole, amounts in minor units; " if "." in written else ""
    known = f"kinds.DENY.reasons.0: `{written}` is neither text nor a plain whole number"
    said = f'{known}: {whole}text is written "{written}"'
    assert str(caught.value).endswith(said)


def test_a_key_is_the_text_that_is_written():
    """A kind may be called NO: as a key it needs no quotes, in a list it does."""
    text = world.CONTRACT.replace("  DENY:", "  NO:\n    reasons: [NEVER]\n  DENY:", 1)
    assert "NO" in parse_contract(text).kinds


def test_an_enumeration_keeps_the_letters_of_its_source():
    text = world.CONTRACT.replace("enum(small, large)", "enum(small, LARGE)").replace('"large"', '"LARGE"')
    assert "enum(small, LARGE)" == parse_contract(text).snapshot["claim.size"]
    with pytest.raises(ContractError, match="large"):
        parse_contract(text.replace('"LARGE"', '"large"'))

"""The texts of cases in the record: they are masked as they come in, sealed under the key of their case as they are
written, and opened as they are read.

A case is one event of one gate, with all its flows. Texts from before there were keys stand in clear, and are read as they
are. Once a case is erased its key is gone (`operations.erasure`), and none of its texts can be written or read.

Masking removes what no record may hold: card numbers (ISO/IEC 7812, 13 to 19 digits, the last one Luhn's), bank accounts
(IBAN, ISO 13616, modulo 97) and API tokens. A number is recognised by its check digits, whatever groups, blanks and dashes
it is written in; a token by how tokens of its kind begin. Pure, linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from sds.kernel.canonical import canonical, digest, sha256_hex
from sds.kernel.errors import CaseKeyError, ErasedError, StoreError, UsageError
from sds.kernel.storage.keyring import DATA_MARK, TEXT_MARK, CaseKey, is_sealed
from sds.kernel.storage.ledger import KEYS_LOST
from sds.kernel.storage.store import Reader, Row, Store

# The columns that hold texts, by the names that ciphertexts are bound to. Of a trigger one field is sealed.
TRIGGER, PROMPT, FACTS = "decision_flows.trigger_event", "context_snapshots.prompt", "ledger.decoding"
PROPOSAL, JUSTIFICATION, ATTEMPT = "policy_proposals.proposal", "policy_proposals.justification", "attempts.proposal"
RATIONALE = "ledger.rationale"
SEALED, FINGERPRINT = "sealed", "fingerprint"  # in JSON a sealed text is an object, which no event can contain
TEXT_FACTS = ("prompt",)  # measured facts that depend on a text
ERASED, LOCKED = "[erased]", "[sealed]"  # shown in place of a text

_KEY = """
SELECT f.gate, f.event_id, k.wrapped, x.erased_at_ms, x.reason FROM {source} f
LEFT JOIN case_keys k ON k.gate = f.gate AND k.event_id = f.event_id
LEFT JOIN erasures x ON x.gate = f.gate AND x.event_id = f.event_id
"""
_OF_CASE = _KEY.format(source="(SELECT ? AS gate, ? AS event_id)")
_OF_FLOW = _KEY.format(source="decision_flows") + "WHERE f.dfid = ?"
_NONE: Row = (None,) * 5
# For a flow from before keys were lost: the wrapped key of its case, and that key's digest in its DECIDED entry.
_FROM_BEFORE_LOSS = f"""
SELECT k.wrapped, CASE WHEN json_valid(d.body) THEN d.body ->> '$.rows.case_keys' END FROM decision_flows f
JOIN ledger x ON x.idx = ({KEYS_LOST}) LEFT JOIN ledger d ON d.dfid = f.dfid AND d.kind = 'DECIDED'
LEFT JOIN case_keys k ON k.gate = f.gate AND k.event_id = f.event_id
WHERE f.dfid = ? AND (f.created_at_ms <= x.at_ms OR d.idx < x.idx)
"""


def key_for_flow(store: Store, dfid: str) -> CaseKey:
    """Do what `key_of_case` does for the case of a flow that is in the record; return the key."""
    return key_of_case(store, store.rows(_OF_FLOW, (dfid,))[0])[0]


def key_of_case(store: Store, case: Row) -> tuple[CaseKey, bytes]:
    """Return the key that seals the texts of a case, and its wrapped form, both made when the case has none, in the
    caller's transaction. `case`: (gate, event, wrapped key, when and why it was erased), as read in that transaction.

    Raises ErasedError when the case was erased.
    """
    gate, event_id, wrapped, erased_at_ms, reason = case
    if erased_at_ms is not None:
        raise _erased(event_id, erased_at_ms, reason)
    if wrapped is not None:
        return store.keyring.unwrap(gate, event_id, wrapped), wrapped
    key, wrapped = store.keyring.new(gate, event_id)
    store.insert("case_keys", gate=gate, event_id=event_id, wrapped=wrapped)
    return key, wrapped


def destroy(store: Store, gate: str, events: tuple[str, ...], *, who: str, reason: str, now_ms: int) -> None:
    """Destroy the keys of a case, in the caller's transaction. `events`: the case's event first, then its saga's steps.

    Raises ErasedError when that was done before, UsageError when the texts of the event lie under no key.
    """
    _, _, wrapped, erased_at_ms, before = store.row(_OF_CASE, (gate, events[0])) or _NONE
    if erased_at_ms is not None:
        raise _erased(events[0], erased_at_ms, before)
    if wrapped is None:
        raise UsageError(f"the texts of event `{events[0]}` have no key: an older version wrote them unencrypted")
    for event_id in events:
        store.insert("erasures", gate=gate, event_id=event_id, who=who, reason=reason, erased_at_ms=now_ms)
        store.run("DELETE FROM case_keys WHERE gate = ? AND event_id = ?", (gate, event_id))


def _erased(event_id: str, at_ms: int, reason: str) -> ErasedError:
    day = datetime.fromtimestamp(at_ms / 1000, UTC).date()
    return ErasedError(f"the texts of event `{event_id}` were erased on {day}: {reason}")


def key_digest(store: Reader, dfid: str) -> str | None:
    """Return the SHA-256 of the wrapped key of a flow's case, as the ledger has it; None when there is no key."""
    found = store.row(_OF_FLOW, (dfid,))
    return None if found is None or found[2] is None else sha256_hex(found[2])


def is_lost(store: Reader, dfid: str) -> bool:
    """Tell whether the key of a flow's case may lie under keys that were lost: it is from before that, and not altered."""
    wrapped, sealed = store.row(_FROM_BEFORE_LOSS, (dfid,)) or (None, None)
    return wrapped is not None and sealed in (None, sha256_hex(wrapped))


def seal_trigger(key: CaseKey, body: str, field: str, fingerprint: str) -> str:
    """Return a trigger as the record keeps it: its field `field` is sealed and stands beside the event's fingerprint."""
    said = json.loads(body)
    return canonical({**said, field: {SEALED: key.seal_text(TRIGGER, said[field]), FINGERPRINT: fingerprint}}).decode()


def seal_facts(key: CaseKey, facts: Mapping[str, object]) -> dict[str, object]:
    """Return measured facts as the ledger keeps them. The digest of a prompt is sealed like the prompt: with it, somebody
    could check a guess of the text.
    """
    texts = {
        name: {SEALED: key.seal_text(FACTS, text)} for name in TEXT_FACTS if isinstance(text := facts.get(name), str)
    }
    return {**facts, **texts}


def fingerprint_in(trigger: str) -> str | None:
    """Return the fingerprint in a trigger; None for a trigger in clear."""
    fields = json.loads(trigger).values()
    return next((str(value[FINGERPRINT]) for value in fields if isinstance(value, dict)), None)


def mend_of_another(store: Reader, dfid: str) -> str:
    """Return what to do with an event whose flow the record does not recognise."""
    if is_lost(store, dfid):
        return "the key that recognises its text is lost, so it may be the same: do not send it under another id"
    return "send what was sent first, or give the event an id of its own"


def recognises(store: Reader, fingerprint: str, body: str) -> bool:
    """Tell whether `fingerprint` is that of this body: under any of the kernel's keys, or as an older version made it."""
    return fingerprint == digest(body) or fingerprint in store.keyring.fingerprints(body)


class Texts:
    """Reads the texts of one flow. The key is looked up when the first sealed text is met.

    Raises ErasedError when the case was erased, and StoreError when the record is locked or the case's key lies under a
    lost one. With `shown`, `[erased]` and `[sealed]` are returned instead. Raises StoreError for a text that was altered.
    """

    def __init__(self, store: Reader, dfid: str, *, shown: bool = False) -> None:
        self._store, self._dfid, self._shown = store, dfid, shown
        self._unwrapped: CaseKey | None = None
        self._lost = False  # True, with `shown`: the key is known to be lost

    def text(self, column: str, stored: str) -> str:
        if not isinstance(stored, str):  # the record was damaged or altered
            raise TypeError("a text of a case is not text")
        if not stored.startswith(TEXT_MARK):
            return stored
        key = self._key_or_word()
        return key if isinstance(key, str) else key.open_text(column, stored)

    def data(self, column: str, stored: bytes) -> bytes:
        if not stored.startswith(DATA_MARK):
            return stored
        key = self._key_or_word()
        return key.encode() if isinstance(key, str) else key.open(column, stored)

    def prompt(self, stored: str) -> tuple[str, ...]:
        """Return the texts of a snapshot's prompt. Raises ValueError or TypeError when there are none."""
        text = self.text(PROMPT, stored)
        return (text,) if text in (ERASED, LOCKED) else tuple(map(str, json.loads(text)))

    def justification(self, stored: str, proposal: bytes) -> str:
        """Return a reason code and the rationale that came with it. The rationale is sealed when the proposal is."""
        code, between, rationale = stored.partition(": ")
        return f"{code}: {self.text(JUSTIFICATION, rationale)}" if between and is_sealed(proposal) else stored

    def rationale(self, entry: Mapping[str, Any]) -> str:
        """Return the text of a RATIONALE entry."""
        return str(entry["text"]) if "text" in entry else self.text(RATIONALE, entry[SEALED])

    def fields(self, column: str, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return a JSON object with each sealed text opened. Raises TypeError when a sealed text is no text."""
        return {
            name: self.text(column, value[SEALED]) if isinstance(value, dict) and SEALED in value else value
            for name, value in stored.items()
        }

    def _key_or_word(self) -> CaseKey | str:
        """Return the key of the case, or the word that is shown when there is none."""
        if self._lost or (self._shown and self._store.locked):
            return LOCKED
        try:
            return self._key
        except ErasedError:
            if not self._shown:
                raise
            return ERASED
        except CaseKeyError:
            if not self._shown or not is_lost(self._store, self._dfid):
                raise
            self._lost = True
            return LOCKED

    @property
    def _key(self) -> CaseKey:
        if self._unwrapped is None:
            gate, event_id, wrapped, erased_at_ms, reason = self._store.row(_OF_FLOW, (self._dfid,)) or _NONE
            if erased_at_ms is not None:
                raise _erased(event_id, erased_at_ms, reason)
            if wrapped is None:
                raise StoreError(f"the key of event `{event_id}` is gone", hint="sds ledger verify", dfid=self._dfid)
            self._unwrapped = self._store.keyring.unwrap(gate, event_id, wrapped)
        return self._unwrapped


CARD, IBAN, TOKEN = "[card]", "[IBAN]", "[token]"

CARD_DIGITS_MIN, CARD_DIGITS_MAX = 13, 19
TOKEN_CHARS_MIN = 16

# What people and programs put between the groups of a number: blanks, dashes, dots, invisible characters.
_BETWEEN = r"[\s._\-\u00ad\u2010-\u2015\u2212\u200b-\u200f\u2060\ufeff]{0,3}"
_DIGITS = re.compile(rf"\d(?:{_BETWEEN}\d)+")
_GROUP = re.compile(r"\d+")
_IBAN_GOES_ON = re.compile(rf"{_BETWEEN}([A-Za-z0-9])")

# Countries by the length of their IBANs: those in the register of ISO 13616, and others that have such numbers.
_IBAN_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "AO CV GW LY MZ PT ST",
    26: "DZ IR IS TR",
    27: "BI CF CG CM DJ FR GA GQ GR IT KM MC MG MR SM TD",
    28: "AL AZ BF BJ BY CI CY DO GT HN HU LB MA ML NE NI PL SN SV TG",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
_IBAN_CHARS = {country: chars for chars, countries in _IBAN_COUNTRIES.items() for country in countries.split()}
_IBAN_BEGINS = re.compile(rf"([A-Za-z]{{2}}){_BETWEEN}([0-9]){_BETWEEN}([0-9])")

_TOKEN_CHARS = r"[A-Za-z0-9_\-.+/=~]{16,}"  # noqa: S105  an alphabet
_TOKEN_RUN = re.compile(_TOKEN_CHARS)
_TOKEN_BEGINS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-|[srp]k_(?:live|test)_|whsec_|gh[opusr]_|github_pat_|glpat-|xox[a-z]-|xapp-|AKIA|ASIA|AIza"
    r"|ya29\.|GOCSPX-|eyJ|hf_|npm_|pypi-|SG\.|shp(?:at|ca|pa|ss)_|dop_v1_)"
)
_BEARER = re.compile(rf"(\bbearer\s{{1,8}})({_TOKEN_CHARS})", re.IGNORECASE)
_DIGIT = re.compile(r"[0-9]")

_Span = tuple[int, int]


def mask(text: str) -> str:
    """Return `text` with whatever may be a card number, an IBAN or an API token replaced. Masked again, it is the same."""
    text = _without_tokens(text)  # first, since tokens have digits, too
    text = _replaced(text, _ibans(text), IBAN)
    return _without_tokens(_replaced(text, _cards(text), CARD))  # again, since a token may have stuck to a number


def _without_tokens(text: str) -> str:
    return _TOKEN_RUN.sub(_without_token, _BEARER.sub(_without_bearer, text))


def _replaced(text: str, spans: Iterable[_Span], word: str) -> str:
    """Replace what `spans` cover by `word`. Spans come in the order in which they begin, and may overlap."""
    kept: list[str] = []
    end = 0
    for first, last in spans:
        if first >= end:
            kept += [text[end:first], word]
        end = max(end, last)
    return "".join([*kept, text[end:]])


def _without_bearer(found: re.Match[str]) -> str:
    return f"{found[1]}{TOKEN}" if _DIGIT.search(found[2]) else found[0]


def _without_token(found: re.Match[str]) -> str:
    """Cut a run of token characters where a token begins in it: it has a digit, which words joined by dashes have not."""
    run = found[0]
    last = max((digit.start() for digit in _DIGIT.finditer(run)), default=-1)
    for begins in _TOKEN_BEGINS.finditer(run):
        if len(run) - begins.start() >= TOKEN_CHARS_MIN and last >= begins.end():
            return f"{run[: begins.start()]}{TOKEN}"
    return run


def _ibans(text: str) -> Iterator[_Span]:
    for begins in _IBAN_BEGINS.finditer(text):
        length = _IBAN_CHARS.get(begins[1].upper(), 0)
        chars, end = "".join(begins.groups()), begins.end()
        while len(chars) < length and (more := _IBAN_GOES_ON.match(text, end)):
            chars, end = chars + more[1], more.end()
        if len(chars) == length and _is_iban(chars):
            yield begins.start(), end


def _is_iban(chars: str) -> bool:
    """Tell whether the check digits fit and at least half are digits: words after `is 20` pass modulo 97 by chance."""
    digits = sum(char.isdecimal() for char in chars)
    return 2 * digits >= len(chars) and int("".join(str(int(char, 36)) for char in chars[4:] + chars[:4])) % 97 == 1


def _cards(text: str) -> Iterator[_Span]:
    for run in _DIGITS.finditer(text):
        if run.end() - run.start() >= CARD_DIGITS_MIN:
            for first, last in _cards_in(run[0]):
                yield run.start() + first, run.start() + last


def _cards_in(run: str) -> Iterator[_Span]:
    """Yield every piece of 13 to 19 digits, from the beginning of a group to the end of one, that passes Luhn's test."""
    groups = [found.span() for found in _GROUP.finditer(run)]
    digits = [int(char) for first, last in groups for char in run[first:last]]
    counted = [0, *accumulate(last - first for first, last in groups)]  # how many digits stand before each group
    sums = _luhn_sums(digits)
    for at, (first, _) in enumerate(groups):
        for to in range(at, len(groups)):
            begin, end = counted[at], counted[to + 1]
            if end - begin > CARD_DIGITS_MAX:
                break
            sum_of = sums[end % 2]
            if end - begin >= CARD_DIGITS_MIN and digits[begin] and (sum_of[end] - sum_of[begin]) % 10 == 0:
                yield first, groups[to][1]


def _luhn_sums(digits: list[int]) -> tuple[list[int], list[int]]:
    """Return the sums of the first n digits with every second one doubled: those of even index, and those of odd index.

    The last digit of a number is never doubled: a number that ends before an even index has its even digits doubled.
    """
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits]
    even = (two if at % 2 == 0 else one for at, (one, two) in enumerate(zip(digits, doubled, strict=True)))
    odd = (two if at % 2 else one for at, (one, two) in enumerate(zip(digits, doubled, strict=True)))
    return [0, *accumulate(even)], [0, *accumulate(odd)]

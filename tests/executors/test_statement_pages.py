"""The statement of a gateway by HTTP: whole over its pages, or not read at all."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sds.executors.http import HttpExecutor
from sds.executors.sandbox.server import GatewayServer
from sds.kernel.errors import WorldError
from sds.kernel.executor.statement import STATEMENT_S_MAX, StatementLine, read_statement
from tests.executors.gateways import connected
from tests.executors.wires import answering, http, keeping_connections, kept


def test_its_statement_comes_whole_over_pages(executor: HttpExecutor, gateway: GatewayServer) -> None:
    for number in range(250):
        said = {"amount": number, "kind": "PAY", "account": "A-1", "reference": f"flow-{number}"}
        gateway.books.pay(f"k-{number}", said, refuse=number == 0)
    lines = read_statement(executor.statement, 0, 10**14)
    assert 250 == len(lines)
    (at_ms,) = {line.at_ms for line in lines[:1]}
    declined = StatementLine("k-0", "rejected", at_ms, 0, "pay_00000001", "flow-0", "PAY", {"amount": 0}, "A-1")
    assert (declined, "settled") == (lines[0], lines[1].outcome)
    assert () == read_statement(executor.statement, 0, 1)


def test_amounts_of_a_statement_may_be_texts_with_decimals_and_nothing_else_then(tmp_path: Path) -> None:
    texts = ("    amount_minor: amount\n", "    amount_minor: amount\n    decimals: 2\n")
    line = {"key": "k", "status": "settled", "at_ms": 1, "id": "p", "order": {"account": "A", "kind": "PAY"}}
    line["order"] |= {"reference": "flow-1", "amount": "12.50"}  # type: ignore[operator]
    for amount, read in (("12.50", 1250), ("-0.05", -5), ("12.5", None), ("1250", None), (12.5, None), (1250, None)):
        reply = http("200 OK", json.dumps({"lines": [line | {"amount": amount}]}).encode())
        with answering(reply) as url, connected(tmp_path, url, texts) as executor:
            if read is None:
                with pytest.raises(WorldError, match="no text with 2 decimals `amount`"):
                    read_statement(executor.statement, 0, 10**14)
                continue
            (found,) = read_statement(executor.statement, 0, 10**14)
            assert (read, {"amount": 1250}) == (found.amount_minor, found.params)


@pytest.mark.parametrize(
    ("amount", "read"),
    [
        ("12.5", 1250),
        ("12.50", 1250),
        ("12.500", 1250),
        ("12", 1200),
        ("-0.05", -5),
        ("0.0", 0),
        ("1e3", 100_000),
        ("12.505", None),
        ("12.5000000000000000000000000001", None),
        ('"12.50"', None),
        ("true", None),
        ("1e18", None),
        ("1e999999999", None),
        ("1e-999999999", None),
        ("9" * 4000, None),
    ],
)
def test_amounts_of_a_statement_may_be_numbers_with_decimals_which_are_read_exactly(
    tmp_path: Path, amount: str, read: int | None
) -> None:
    numbers = ("    amount_minor: amount\n", "    amount_minor: amount\n    decimals: 2\n    amounts: number\n")
    params = ("    params: {amount: order.amount}", "")
    line = '{"key": "k", "status": "settled", "at_ms": 1, "id": "p", "order": {"account": "A", "kind": "PAY", "reference": "f"}'
    reply = http("200 OK", f'{{"lines": [{line}, "amount": {amount}}}]}}'.encode())
    with answering(reply) as url, connected(tmp_path, url, numbers, params) as executor:
        if read is None:
            with pytest.raises(WorldError, match="no JSON number with 2 decimals `amount`"):
                read_statement(executor.statement, 0, 10**14)
            return
        (found,) = read_statement(executor.statement, 0, 10**14)
        assert read == found.amount_minor


PAGE = json.dumps({"lines": []}).encode()
LINKED = ("&after={after}\n  lines: lines\n  next: next", "\n  lines: lines\n  next_link: true")


@pytest.mark.parametrize(
    "link",
    [
        '<?page=2>; rel="next"',
        "</statement?page=2>; rel=next",
        '<{url}/statement?page=2>; rel="next"',
        '<{url}/statement?page=9>; rel="last", <{url}/statement?page=2>; title="a, b; c"; rel="prefetch NEXT"',
        '<?page=1>;rel="first",<?page=2>;rel="next"',
    ],
)
def test_the_next_page_is_where_the_link_says(link: str, tmp_path: Path) -> None:
    def page(number: int) -> bytes:
        header = [f"Link: {link.format(url=url)}"] if number == 0 else ['Link: <?page=1>; rel="prev"']
        return kept(PAGE, *header).replace(b"201 Created", b"200 OK")

    with keeping_connections(page) as (url, asked), connected(tmp_path, url, LINKED) as executor:
        assert () == read_statement(executor.statement, 0, 10**14)
    assert [b"GET /statement?since=0&", b"GET /statement?page=2 H"] == [request[:23] for request in asked]


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("<https://elsewhere.example/statement?page=2>; rel=next", "is no path at the gateway's own address"),
        ("<//elsewhere.example/statement>; rel=next", "is no path at the gateway's own address"),
        ("<{url}.elsewhere.example/statement>; rel=next", "is no path at the gateway's own address"),
        ("<{url}@elsewhere.example/statement>; rel=next", "is no path at the gateway's own address"),
        ("<{url}>; rel=next", "is no path at the gateway's own address"),
        ("<?page=2#x>; rel=next", "is no path at the gateway's own address"),
        ("<?page=2 3>; rel=next", "is no path at the gateway's own address"),
        ("<?page=2>; rel=next, <?page=3>; rel=next", "names two next pages"),
        ("?page=2; rel=next", "a `Link` header that cannot be read"),
        ("<?page=2>; rel=next; <?page=3>", "a `Link` header that cannot be read"),
        ("</statement?since=0&until=100000000000000>; rel=next", "does not end: it names a page twice"),
        ("<?page=" + "2" * 5000 + ">; rel=next", "of more than 4096 characters"),
    ],
)
def test_a_link_that_leads_elsewhere_or_cannot_be_read_is_not_followed(link: str, why: str, tmp_path: Path) -> None:
    def page(number: int) -> bytes:
        header = [f"Link: {link.format(url=url)}"] if number == 0 or "since" in link else []
        return kept(PAGE, *header).replace(b"201 Created", b"200 OK")

    with keeping_connections(page) as (url, asked), connected(tmp_path, url, LINKED) as executor:
        with pytest.raises(WorldError, match=why):
            read_statement(executor.statement, 0, 10**14)
        assert 1 == len(asked)


@pytest.mark.parametrize(
    ("pages", "asked_after", "why"),
    [
        ([{"more": True, "next": "7"}, {"more": False, "next": "8"}], [None, "7"], None),
        ([{"more": False}], [None], None),
        ([{"more": True}], [None], "says that there is a next page, and does not name it"),
        ([{"next": "7"}], [None], "does not say by `more` whether there is a next page"),
        ([{"more": "true", "next": "7"}], [None], "does not say by `more` whether there is a next page"),
        ([{"more": True, "next": True}], [None], "by what is neither text nor a whole number"),
    ],
)
def test_a_field_may_say_whether_there_is_a_next_page(
    pages: list[dict[str, object]], asked_after: list[str | None], why: str | None, tmp_path: Path
) -> None:
    def page(number: int) -> bytes:
        return kept(json.dumps({"lines": []} | pages[number]).encode()).replace(b"201 Created", b"200 OK")

    more = ("  next: next\n", "  next: next\n  more: more\n")
    with keeping_connections(page) as (url, asked), connected(tmp_path, url, more) as executor:
        if why:
            with pytest.raises(WorldError, match=why):
                read_statement(executor.statement, 0, 10**14)
        else:
            assert () == read_statement(executor.statement, 0, 10**14)
    found = [re.search(rb"[?&]after=([^ &]*)", request) for request in asked]
    assert asked_after == [match[1].decode() if match else None for match in found]


def test_the_first_page_has_the_value_that_the_file_gives(tmp_path: Path) -> None:
    first = ("  next: next\n", '  next: next\n  first: ""\n')
    with (
        keeping_connections(lambda _n: kept(PAGE).replace(b"201 Created", b"200 OK")) as (url, asked),
        connected(tmp_path, url, first) as executor,
    ):
        assert () == read_statement(executor.statement, 0, 10**14)
    assert b"&after= HTTP" in asked[0]


def test_a_line_without_a_key_is_somebody_elses_only_where_the_file_says_so(tmp_path: Path) -> None:
    skip = ("    key: key\n", "    key: key\n    skip_without_key: true\n")
    reply = http("200 OK", json.dumps({"lines": [{"id": "by hand"}, {"key": None}]}).encode())
    with answering(reply) as url:
        with connected(tmp_path, url, skip) as executor:
            assert () == read_statement(executor.statement, 0, 10**14)
        with connected(tmp_path, url) as executor, pytest.raises(WorldError, match="cannot be read"):
            read_statement(executor.statement, 0, 10**14)


def test_a_statement_of_pages_without_lines_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(number: int) -> bytes:
        return kept(json.dumps({"lines": [], "next": str(number)}).encode()).replace(b"201 Created", b"200 OK")

    with keeping_connections(page) as (url, asked), connected(tmp_path, url) as executor:
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (STATEMENT_S_MAX if len(asked) > 1 else 0))
        for module in ("executor", "client"):
            monkeypatch.setattr(f"sds.executors.http.{module}.time", clock)
        with pytest.raises(WorldError, match="gave no statement: nothing was sent: the deadline has passed"):
            read_statement(executor.statement, 0, 10**14)
        assert 2 == len(asked)


@pytest.mark.parametrize(
    "page",
    [
        {"lines": {}},
        {"lines": [{"key": "k"}]},
        {"lines": [], "next": "0"},
        {"lines": [], "next": ["1"]},
        {"lines": [{"key": "k", "status": "lost", "at_ms": 1, "amount": 1, "id": "p", "order": {}}]},
        {"lines": [{"key": "k", "status": "settled", "at_ms": 1.5, "amount": 1, "id": "p", "order": {}}]},
    ],
)
def test_a_statement_that_is_odd_anywhere_is_unreadable(page: object, tmp_path: Path) -> None:
    with answering(http("200 OK", json.dumps(page).encode())) as url, connected(tmp_path, url) as executor:
        with pytest.raises(WorldError) as caught:
            read_statement(executor.statement, 0, 10**14)
        mend = "compare a page of the statement with `statement` in the gateway's file"
        assert ("STATEMENT_UNREADABLE", mend) == (caught.value.reason_code, caught.value.hint)


@pytest.mark.parametrize(
    ("answer", "mend"),
    [
        (http("404 Not Found", b"{}"), "check the path of `statement` and the secret in its file"),
        (http("200 OK", b"{"), "compare a page of the statement with `statement` in the gateway's file"),
        (b"", "check that the gateway runs and that `address` in its file is right, then try again"),
    ],
)
def test_a_statement_that_cannot_be_had_says_what_to_look_at(answer: bytes, mend: str, tmp_path: Path) -> None:
    with answering(answer) as url, connected(tmp_path, url) as executor:
        with pytest.raises(WorldError) as caught:
            read_statement(executor.statement, 0, 10**14)
        assert ("STATEMENT_UNREADABLE", mend) == (caught.value.reason_code, caught.value.hint)

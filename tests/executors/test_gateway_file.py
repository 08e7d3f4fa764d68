"""A gateway file: what is wrong with it is said in one line with its place, and no secret is ever shown."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import BaseModel

from sds.executors.http import HttpExecutor, form, load_executor
from sds.executors.sandbox.server import GatewayServer
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX
from sds.kernel.errors import UsageError
from tests.executors.apis.certificates import certificate
from tests.executors.apis.paypal import CLIENT_SECRET, PayPal
from tests.executors.apis.serving import serving
from tests.executors.gateways import EXAMPLE, connected, in_thread, order, written

KEY = "k" * 64
SECRET = "tok-5f2c81b9"  # noqa: S105  of these tests
SECRETS = {CLIENT_SECRET, "A21AA-1-token"}
TOKEN = ("# authentication:", "authentication:")
IN_FILE = ("secret: {env: GATEWAY_TOKEN}", "secret: {file: token.txt}")
ORDER_RULES = """  settled: [{status: [201], where: {status: settled, amount: "{params.amount}", currency: "{currency}"}}]
  rejected: [{status: [402], where: {status: rejected}}]
  pending: [{status: [202], where: {status: accepted}}]
"""


def refusal(folder: Path, text: str) -> str:
    (folder / "gateway.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_executor(folder / "gateway.yaml").close()
    assert "GATEWAY_INVALID" == caught.value.reason_code
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(folder / "gateway.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("idempotent: true ", "idempotent: yes indeed", ":3: idempotent: must be true or false"),
        ("idempotent: true ", "# ", ":2: idempotent: is missing"),
        ("currency: EUR", "curency: EUR", ":5: curency: is not a known field: did you mean `currency`?"),
        ("http://127.0.0.1:8099", "http://pay.example", ":2: address: must begin with https://"),
        ("http://127.0.0.1:8099", "https://me:pw@pay.example", ":2: address: must be a URL without a user name"),
        ("currency: EUR", "proxy: http://proxy.example:3128", ":5: proxy: must be left out: an http:// address"),
        ("http://127.0.0.1:8099", "https://me:1/pw@pay.example", ":2: address: must be a URL without a user name"),
        ("http://127.0.0.1:8099", "ftp://127.0.0.1", ":2: address: must begin with https://"),
        ("status: [402]", "status: [409]", ":18: order.rejected.0.status.0: must not be 409"),
        ("status: [402]", "status: [503]", ":18: order.rejected.0.status.0: must not be 503"),
        ("status: [201]", "status: [302]", ":17: order.settled.0.status.0: must not be 302"),
        ('"{kind}"', '"{knid}"', ":11: order.fields: `{knid}` is not a placeholder; placeholders are: currency,"),
        ('"{kind}"', '"{kind"', ":11: order.fields: `{` is not a placeholder"),
        ("/payments/{key}/void", "/payments/{dfid}/void", ":27: void.path: `{dfid}` is not a placeholder"),
        ("path: /payments/{key}/void", "path: payments/void", ":27: void.path: must be a path that begins with `/`"),
        ("  key_header: Idempotency-Key\n", "", ":8: order: must send the order's key"),
        (ORDER_RULES, "", ":8: order: needs `settled` or `pending`"),
        (
            '{params.amount}", currency: "{currency}"}}]\n  rej',
            '{parms.amount}"}}]\n  rej',
            ":17: order.settled: `{parms",
        ),
        ("where: {status: absent}", "where: {status: '{dfdi}'}", ":25: lookup.absent: `{dfdi}` is not a placeholder"),
        (
            "reply: {key: key, reference: id}",
            "reply: {reference: id}",
            ":7: reply: must have either `key` or `key_header`",
        ),
        ("key_header: Idempotency-Key", "key_header: Content-Length", ":10: order.key_header: must be the name of a"),
        ("  next: next\n", "", ":30: statement: needs both"),
        ("settled: settled, ", "settled: paid, ", ":37: statement.line.outcomes.settled: must be 'settled'"),
        (
            "currency: EUR",
            "key_form: uuid",
            ":30: statement: lists whole keys: with `key_form`, `order` must send `{whole_key}`",
        ),
        ("currency: EUR", "key_form: half", ":5: key_form: must be"),
        ("currency: EUR", "currency: EUR\ntls: {ca: ca.pem}", ":6: tls: must be left out"),
        ("currency: EUR", "currency: EUR\ncurrency: USD", ":6: `currency` is given twice"),
        ("currency: EUR", "currency: [", ": not YAML"),
        ("currency: EUR", r'currency: "EU\e[2JR"', ":5: the character U+001B is not allowed"),
        ("currency: EUR", r'currency: "\UFFFFFFFF"', ":5: not YAML: a number in it is too large"),
        ("  fields:", "  body: xml\n  fields:", ":11: order.body: must be 'json' or 'form'"),
        ("  path: /payments/{key}/void", "  path: /{key}\n  body: form", ":28: void.body: needs `fields`"),
        (
            "  fields:",
            "  body: form\n  fields:\n    a[b]: x",
            ":12: order.fields: `a[b]` is not a name in a form: nest a map",
        ),
        (
            "  fields:",
            "  body: form\n  fields:\n    a: {}",
            ":12: order.fields: must not have an empty mapping or list",
        ),
        (
            '"{params.amount}"  ',
            '"EUR {params.amount:2n}"  ',
            ":11: order.fields: `{params.amount:2n}` is a number, which",
        ),
        (
            "path: /payments\n",
            'path: "/payments/{params.amount:2n}"\n',
            ":9: order.path: `{params.amount:2n}` is a number",
        ),
        ('amount: "{params.amount}", currency', 'amount: "{params.amount:2N}", currency', ":17: order.settled: `{`"),
        (
            "  next: next\n",
            "  next: next\n  next_link: true\n",
            ":34: statement.next_link: must be left out: `next` names",
        ),
        ("  next: next\n", "  next_link: true\n", ":30: statement: needs both `next` and `{after}` in its path"),
        (
            "&after={after}\n  lines: lines\n  next: next",
            "\n  lines: lines\n  more: m",
            ":33: statement.more: needs `next`",
        ),
        (
            "&after={after}\n  lines: lines\n  next: next",
            "\n  lines: lines\n  first: x",
            ":33: statement.first: needs `next`",
        ),
        ("&after={after}", "/{after}", ":30: statement: needs `first`: its path has `{after}` outside a parameter"),
        ("    amount_minor: amount\n", "    amounts: number\n", ":39: statement.line.amounts: needs `decimals`"),
        (
            "    amount_minor: amount\n",
            "    amounts: float\n",
            ":39: statement.line.amounts: must be 'text' or 'number'",
        ),
        ("currency: EUR", "signature: {header: X-S}", ":5: signature.secret: is missing"),
        (
            "currency: EUR",
            "signature: {header: X-S, secret: {env: A}, of: body}",
            ":5: signature.of: is not a known field",
        ),
        (
            "currency: EUR",
            "signature: {header: X-S, secret: {env: A}, encoding: raw}",
            ":5: signature.encoding: must be 'hex'",
        ),
        ("currency: EUR", f"signature: {{header: X-S, secret: {SECRET}}}", ":5: signature.secret: must be a mapping"),
        (
            "currency: EUR",
            "authentication: {prefix: Token}",
            ":5: authentication: must have either `secret` or `oauth2`",
        ),
        (
            "currency: EUR",
            "authentication: {secret: {env: A}}\nsignature: {header: authorization, secret: {env: A}}",
            ":6: signature.header: must be another header than that of `authentication`",
        ),
        (
            "currency: EUR",
            "authentication: {secret: {env: A}, oauth2: {token_url: https://a, client_id: {env: A}, client_secret: {env: B}}}",
            ":5: authentication: must have either `secret` or `oauth2`",
        ),
        *(
            ("currency: EUR", f"authentication: {{oauth2: {{{said}}}}}", f":5: authentication.oauth2{message}")
            for said, message in (
                ("client_id: {env: A}, client_secret: {env: B}", ".token_url: is missing"),
                (
                    "token_url: http://pay.example/t, client_id: {env: A}, client_secret: {env: B}",
                    ".token_url: must begin",
                ),
                (
                    "token_url: /token, client_id: {env: A}, client_secret: {env: B}",
                    ".token_url: must begin with https://",
                ),
                ("token_url: https://pay.example/t, client_secret: {env: B}", ".client_id: is missing"),
                (
                    "token_url: https://pay.example/t, client_id: abc, client_secret: {env: B}",
                    ".client_id: must be a mapping",
                ),
                (
                    f"token_url: https://a/t, client_id: {{env: A}}, client_secret: {SECRET}",
                    ".client_secret: must be a map",
                ),
                (
                    "token_url: https://a/t, client_id: {env: A}, client_secret: {env: B}, credentials_in: query",
                    ".credentials_in: ",
                ),
                (
                    "token_url: https://a/t, client_id: {env: A}, client_secret: {env: B}, grant: x",
                    ".grant: is not a known",
                ),
                (
                    "token_url: https://a/t, client_id: {env: A, file: b}, client_secret: {env: B}",
                    ".client_id: must have",
                ),
            )
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert old in text
    found = refusal(tmp_path, text.replace(old, new))
    assert message in found, found
    assert SECRET not in found


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    assert ":1: the file is empty" == refusal(tmp_path, "")
    with pytest.raises(UsageError, match="cannot be read: no such file") as refused:
        load_executor(tmp_path / "none.yaml")
    assert "check the path" == refused.value.hint
    (tmp_path / "gateway.yaml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8 at byte 0"):
        load_executor(tmp_path / "gateway.yaml")


def test_a_file_is_refused_whole_where_it_has_too_many_bytes_although_not_too_many_characters(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for blanks in ("", " "):  # in one of the two, the first byte too many ends within a character
        said = refusal(tmp_path, f"{text}#{blanks}{'ü' * (FILE_BYTES_MAX // 2)}\nnosuch: 1\n")
        assert said.endswith(f"` is larger than {FILE_BYTES_MAX} bytes")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GatewayServer]:
    with in_thread(tmp_path, token=SECRET) as server:
        yield server


def test_the_secret_comes_from_the_environment(
    guarded: GatewayServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
    with connected(tmp_path, guarded.url, TOKEN) as executor:
        assert "settled" == executor.dispatch(order(), KEY, 2.0).status
        assert SECRET not in repr(vars(executor)) + repr(executor)


def test_the_secret_comes_from_a_file_and_another_may_take_its_place(guarded: GatewayServer, tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text(f"{SECRET}\n")
    with connected(tmp_path, guarded.url, TOKEN, IN_FILE) as executor:
        assert "settled" == executor.dispatch(order(), KEY, 2.0).status
        (tmp_path / "token.txt").write_text("wrong")
        assert "unknown" == executor.lookup(KEY, 2.0).status
        (tmp_path / "token.txt").unlink()
        assert "unknown" == executor.lookup(KEY, 2.0).status
        assert "unsent" == executor.dispatch(order("l" * 64), "l" * 64, 2.0).status


def test_a_gateway_that_repeats_the_secret_does_not_get_it_into_the_record(
    guarded: GatewayServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
    with connected(tmp_path, guarded.url, TOKEN, ("reference: id}", "reference: key}")) as executor:
        found = executor.dispatch(order(f"{SECRET}-1"), f"{SECRET}-1", 2.0)
    assert ("settled", "***-1") == (found.status, found.reference)


@pytest.mark.parametrize("given", ["", "a\nb", "ü"])
def test_a_secret_that_is_none_is_refused_and_not_shown(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", given)
    text = EXAMPLE.read_text(encoding="utf-8").replace(*TOKEN)
    assert ": the variable `GATEWAY_TOKEN` holds no secret" == refusal(tmp_path, text)
    assert ": the secret cannot be read from the file `token.txt`" == refusal(tmp_path, text.replace(*IN_FILE))


def test_a_secret_in_the_file_itself_is_refused_and_not_shown(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace(*TOKEN)
    for given in (SECRET, "{env: GATEWAY_TOKEN, file: token.txt}", f"{{value: {SECRET}}}"):
        assert SECRET not in refusal(tmp_path, text.replace("{env: GATEWAY_TOKEN}", given))


def test_a_certificate_that_nobody_trusts_is_refused_and_one_of_the_files_own_authority_is_taken(
    tmp_path: Path,
) -> None:
    server_side = certificate(tmp_path, "server")
    with in_thread(tmp_path, tls=server_side) as server:
        with connected(tmp_path, server.url) as strangers:
            refused = strangers.dispatch(order(), KEY, 5.0)
            assert ("unsent", True) == (refused.status, "self-signed certificate" in refused.detail)
        assert 0 == server.books.totals()["settled"]
        with connected(tmp_path, server.url, ("currency: EUR", "currency: EUR\ntls: {ca: server.pem}")) as friends:
            assert "settled" == friends.dispatch(order(), KEY, 5.0).status
        other = server.url.replace("127.0.0.1", "localhost")  # which the certificate does not name
        with connected(tmp_path, other, ("currency: EUR", "currency: EUR\ntls: {ca: server.pem}")) as misled:
            refused = misled.dispatch(order("l" * 64), "l" * 64, 5.0)
            assert ("unsent", True) == (refused.status, "not valid for 'localhost'" in refused.detail)


def test_a_token_is_fetched_by_the_same_rules_of_tls_and_sent_to_nobody_else(tmp_path: Path) -> None:
    server_side = certificate(tmp_path, "server")
    api = PayPal("COMPLETED")
    with serving(api, server_side) as url:
        (tmp_path / "strangers.yaml").write_text(api.file(url), encoding="utf-8")
        (tmp_path / "friends.yaml").write_text(f"{api.file(url)}tls: {{ca: server.pem}}\n", encoding="utf-8")
        with closing(load_executor(tmp_path / "strangers.yaml")) as executor:
            found = executor.lookup_order(order(), "p-1", 5.0)
            assert ("unknown", True) == (found.status, "self-signed certificate" in found.detail)
            assert "unsent" == executor.dispatch(order(), KEY, 5.0).status
        assert 0 == api.given
        with closing(load_executor(tmp_path / "friends.yaml")) as executor:
            assert "settled" == executor.dispatch(order(), KEY, 5.0).status
            assert SECRETS.isdisjoint(re.findall(r"[\w~-]+", repr(vars(executor)) + repr(vars(executor._client))))


def test_a_gateway_that_asks_who_we_are_is_shown_ourcertificate(tmp_path: Path) -> None:
    server_side = certificate(tmp_path, "server")
    certificate(tmp_path, "client")
    server_side.verify_mode = ssl.CERT_REQUIRED
    server_side.load_verify_locations(tmp_path / "client.pem")
    tls = "tls: {ca: server.pem, certificate: client.pem, key: client.key}"
    with in_thread(tmp_path, tls=server_side) as server:
        with connected(tmp_path, server.url, ("currency: EUR", f"currency: EUR\n{tls}")) as executor:
            assert "settled" == executor.dispatch(order(), KEY, 5.0).status
        with connected(tmp_path, server.url, ("currency: EUR", "currency: EUR\ntls: {ca: server.pem}")) as nobody:
            assert "settled" != nobody.dispatch(order("l" * 64), "l" * 64, 5.0).status


def test_certificates_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("http://127.0.0.1:8099", "https://pay.example")
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("none.pem", "bad.pem"):
        found = refusal(tmp_path, text.replace("currency: EUR", f"currency: EUR\ntls: {{ca: {name}}}"))
        assert ": its certificates cannot be read" in found


def test_the_file_that_the_package_brings_is_one(tmp_path: Path) -> None:
    with closing(load_executor(written(tmp_path, "http://127.0.0.1:8099"))) as made:
        assert isinstance(made, HttpExecutor)
        assert (True, None) == (made.idempotent, made.keys_kept_ms)


def test_the_library_page_names_every_field_of_a_gateway_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    section = page.partition("## Any gateway by HTTP")[2].partition("\n## ")[0]
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    named = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]*)`", prose))))
    models = [m for m in vars(form).values() if isinstance(m, type) and issubclass(m, BaseModel)]
    assert set() == {field for model in models for field in model.model_fields} - named

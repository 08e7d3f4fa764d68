"""Certificates that are renewed or vanish while a service runs: nobody need start it anew."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from threading import Thread

from tests.executors.apis.certificates import certificate
from tests.executors.gateways import connected, in_thread, order

OURS = ("currency: EUR", "currency: EUR\ntls: {ca: server.pem, certificate: client.pem, key: client.key}")


def letting_in(folder: Path, server_side: ssl.SSLContext) -> ssl.SSLContext:
    """Return the server's side, which lets nobody in but who shows the client's certificate as it is now."""
    server_side.verify_mode = ssl.CERT_REQUIRED
    server_side.load_verify_locations(folder / "client.pem")
    return server_side


def test_certificates_are_those_that_were_renewed_last_ours_and_the_authority_that_is_trusted(tmp_path: Path) -> None:
    certificate(tmp_path, "client")
    first, keys = letting_in(tmp_path, certificate(tmp_path, "server")), ("a" * 64, "b" * 64, "c" * 64)
    with in_thread(tmp_path, tls=first) as server, connected(tmp_path, server.url, OURS) as executor:
        port = server.server_port
        assert "settled" == executor.dispatch(order(keys[0]), keys[0], 5.0).status
        server.shutdown()
        server.server_close()
        certificate(tmp_path, "client")
        renewed = letting_in(tmp_path, certificate(tmp_path, "server"))
        with in_thread(tmp_path, tls=renewed, port=port):
            assert "settled" == executor.dispatch(order(keys[1]), keys[1], 5.0).status
            executor.close()  # no connection is kept
            assert "settled" == executor.dispatch(order(keys[2]), keys[2], 5.0).status


def test_while_certificates_do_not_fit_or_are_gone_the_last_ones_are_shown(tmp_path: Path) -> None:
    certificate(tmp_path, "client")
    server_side = letting_in(tmp_path, certificate(tmp_path, "server"))
    with in_thread(tmp_path, tls=server_side) as server, connected(tmp_path, server.url, OURS) as executor:
        (tmp_path / "client.key").rename(tmp_path / "of-before.key")
        assert "settled" == executor.dispatch(order("a" * 64), "a" * 64, 5.0).status
        certificate(tmp_path, "client")
        (tmp_path / "of-before.key").replace(tmp_path / "client.key")  # the key is of another certificate
        assert "settled" == executor.dispatch(order("b" * 64), "b" * 64, 5.0).status
        for name in ("client.pem", "client.key", "server.pem"):
            (tmp_path / name).unlink()
        assert "settled" == executor.dispatch(order("c" * 64), "c" * 64, 5.0).status


def refuse_all(listener: socket.socket, server_side: ssl.SSLContext) -> None:
    """Refuse the certificate of whoever connects, and read what they send until they close: to close before them would discard
    the alert that says why.
    """
    with suppress(OSError):  # the listener is shut
        while True:
            connection, _ = listener.accept()
            with connection.dup() as below:
                with suppress(ssl.SSLError), server_side.wrap_socket(connection, server_side=True) as let_in:
                    let_in.recv(1)
                while below.recv(4096):
                    pass


def test_a_certificate_of_ours_that_has_expired_is_named_in_what_became_of_the_order(tmp_path: Path) -> None:
    """The gateway refuses it after the order was sent (TLS 1.3), so the order is unknown."""
    certificate(tmp_path, "client", days=-1)
    server_side = letting_in(tmp_path, certificate(tmp_path, "server"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=refuse_all, args=(listener, server_side), daemon=True)
        thread.start()
        with connected(tmp_path, f"https://127.0.0.1:{listener.getsockname()[1]}", OURS) as executor:
            found = executor.dispatch(order("a" * 64), "a" * 64, 5.0)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert ("unknown", True) == (found.status, "CERTIFICATE_EXPIRED" in found.detail), found.detail

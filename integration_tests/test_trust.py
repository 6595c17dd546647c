"""Whose certificates are trusted: those of the authorities that are named, and of no others."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from integration_tests.patience import PATIENCE_S
from integration_tests.secured import AUTHORITY, CERTIFICATES, SERVER
from rollbridge.base.security import Security, ZooKeeperSecurity

STRANGER = CERTIFICATES / "stranger.pem"
Connect = Callable[[dict[str, str], tuple[str, int]], socket.socket]


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """A TLS server whose certificate the authority of our tests has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / SERVER)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # until it is closed
            while True:
                raw, _ = listening.accept()
                with suppress(OSError), context.wrap_socket(raw, server_side=True) as wrapped:
                    wrapped.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    yield listening.getsockname()
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(PATIENCE_S)


@pytest.fixture(params=["kafka", "zookeeper"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """How our own connections are made."""

    def to_kafka(config: dict[str, str], address: tuple[str, int]) -> socket.socket:
        context = Security.from_config(config).tls_context()
        return context.wrap_socket(socket.create_connection(address, PATIENCE_S), server_hostname="127.0.0.1")

    def to_zookeeper(config: dict[str, str], address: tuple[str, int]) -> socket.socket:
        handler = ZooKeeperSecurity.from_config(config).kazoo_options()["handler"]
        connected: socket.socket = handler.create_connection(address, hostname="127.0.0.1", timeout=PATIENCE_S)
        return connected

    return to_kafka if request.param == "kafka" else to_zookeeper


def settings(ca: Path | None, identification: str = "https") -> dict[str, str]:
    named = {} if ca is None else {"ssl.ca.location": str(ca)}
    return {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": identification, **named}


@pytest.mark.parametrize("identification", ["https", "none"])
def test_the_systems_authorities_are_not_trusted_beside_one_that_is_named(
    connect: Connect, server: tuple[str, int], identification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / AUTHORITY))  # as if the system trusted it
    with closing(connect(settings(None, identification), server)):
        pass
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(settings(STRANGER, identification), server)
    with closing(connect(settings(CERTIFICATES / AUTHORITY, identification), server)):
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_directory_of_authorities_is_taken_as_librdkafka_takes_it(
    connect: Connect, server: tuple[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(settings(tmp_path), server)
    shutil.copy(CERTIFICATES / AUTHORITY, tmp_path)
    subprocess.run(["openssl", "rehash", str(tmp_path)], check=True)
    with closing(connect(settings(tmp_path), server)):
        pass


def test_a_file_that_is_gone_since_is_a_connection_that_fails_for_now(server: tuple[str, int], tmp_path: Path) -> None:
    """kazoo would end its thread over anything else, and never connect again."""
    file = tmp_path / "ca.pem"
    shutil.copy(CERTIFICATES / AUTHORITY, file)
    handler = ZooKeeperSecurity.from_config(settings(file)).kazoo_options()["handler"]
    file.unlink()
    with pytest.raises(OSError, match="cannot use"):
        handler.create_connection(server, hostname="127.0.0.1", timeout=PATIENCE_S)
    shutil.copy(CERTIFICATES / AUTHORITY, file)
    with closing(handler.create_connection(server, hostname="127.0.0.1", timeout=PATIENCE_S)):
        pass

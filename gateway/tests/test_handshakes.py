"""What clients are told when TLS fails, and certificates that run out."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop

from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError
from rollbridge.kafka.ratelimit import LIMITER
from rollbridge.security.certificates import ends_of_validity
from rollbridge_gateway.settings import GatewaySettings
from rollbridge_gateway.shell.framing import MessageStream
from rollbridge_gateway.shell.handshakes import telling

CERTIFICATES = Path(__file__).parents[2] / "integration_tests/certificates"
SERVER, AUTHORITY, STRANGER = (str(CERTIFICATES / name) for name in ("server.pem", "ca.pem", "stranger.pem"))
VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


def settings(certificate: str = SERVER) -> GatewaySettings:
    return GatewaySettings(
        connection=ConnectionSettings(bootstrap_servers="k:1", zookeeper="z:1"),
        certificate=certificate,
        client_ca=AUTHORITY,
    )


def handshake(port: int, version: ssl.TLSVersion, authority: str, certificate: str | None) -> str:
    """What a client is told."""
    context = ssl.create_default_context(cafile=authority)
    context.maximum_version = version
    if certificate is not None:
        context.load_cert_chain(certificate, password="only-a-test")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
                return connection.recv(5).decode()
        except ssl.SSLError as fault:
            return str(fault.reason)


def told(failed: Callable[[], None], *client: object) -> str:
    """What a client of a server like a gateway's is told."""

    async def ask() -> str:
        context = settings().tls_context()
        assert context is not None
        context.sslobject_class = telling(failed)
        loop, greetings = asyncio.get_running_loop(), []

        async def greet(stream: MessageStream) -> None:
            with suppress(OSError):
                await stream.encrypt(context, 60)
                stream.transport.write(b"hello")

        def opened(stream: MessageStream) -> None:
            greetings.append(loop.create_task(greet(stream)))

        server = await loop.create_server(lambda: MessageStream(opened), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await asyncio.to_thread(handshake, port, *client)  # type: ignore[arg-type]
            await asyncio.wait(greetings)
            return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ask())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_without_a_certificate_gets_an_alert_and_the_log_says_why(
    version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITER, "filter", lambda record: True)
    failures: list[None] = []
    with caplog.at_level(logging.WARNING):
        found = told(lambda: failures.append(None), version, AUTHORITY, None)
    expected = {VERSIONS[0]: "SSLV3_ALERT_HANDSHAKE_FAILURE", VERSIONS[1]: "TLSV13_ALERT_CERTIFICATE_REQUIRED"}
    assert found == expected[version]
    assert "tls.refused reason='PEER_DID_NOT_RETURN_A_CERTIFICATE'" in caplog.text
    assert len(failures) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_one_of_another_authority_is_told_so(version: ssl.TLSVersion, tmp_path: Path) -> None:
    mine = made(tmp_path, 30)
    assert told(lambda: None, version, AUTHORITY, str(mine)) == "TLSV1_ALERT_UNKNOWN_CA"


def test_one_that_does_not_trust_the_gateway_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITER, "filter", lambda record: True)
    with caplog.at_level(logging.WARNING):
        assert told(lambda: None, VERSIONS[1], STRANGER, None) == "CERTIFICATE_VERIFY_FAILED"
    assert "tls.refused reason='TLSV1_ALERT_UNKNOWN_CA'" in caplog.text


@pytest.mark.parametrize("version", VERSIONS)
def test_who_has_one_gets_in(version: ssl.TLSVersion) -> None:
    assert told(lambda: pytest.fail("nothing has failed"), version, AUTHORITY, SERVER) == "hello"


def made(folder: Path, days: int) -> Path:
    """A certificate with its key that runs out after so many days."""
    path = folder / "made.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", str(days)]
    subprocess.run([*command, "-keyout", str(path), "-out", f"{path}.crt"], check=True, capture_output=True)
    with path.open("ab") as file, Path(f"{path}.crt").open("rb") as crt:
        shutil.copyfileobj(crt, file)
    return path


def test_a_certificate_that_has_run_out_is_refused_and_one_that_soon_will_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checked = settings(str(made(tmp_path, 20)))
    [until] = ends_of_validity(checked.certificate)
    with caplog.at_level(logging.WARNING):
        checked.check_certificate(until - timedelta(days=15))
        assert not caplog.records
        checked.check_certificate(until - timedelta(days=13))
    assert f"certificate.expires file={checked.certificate} until={until:%Y-%m-%d}" in caplog.text
    with pytest.raises(ConfigError, match=r"made\.pem has run out on .* nothing was begun; renew it"):
        checked.check_certificate(until)


def test_an_authoritys_that_has_run_out_is_told_and_keeps_no_gateway_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for days, name in ((20, "own"), (10, "authority")):
        (tmp_path / name).mkdir()
        made(tmp_path / name, days)
    chain = tmp_path / "chain.pem"
    chain.write_text("".join((tmp_path / name / "made.pem").read_text() for name in ("own", "authority")))
    checked = settings(str(chain))
    own, authority = ends_of_validity(str(chain))
    with caplog.at_level(logging.WARNING):
        checked.check_certificate(authority + timedelta(days=1))
    assert f"certificate.expires file={chain} until={authority:%Y-%m-%d}" in caplog.text
    with pytest.raises(ConfigError, match=f"has run out on {own:%Y-%m-%d}"):
        checked.check_certificate(own)

"""When certificates run out, as openssl says it."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollbridge.base.security import ends_of_validity

CERTIFICATES = Path(__file__).parents[2] / "integration_tests/certificates"


def told_by_openssl(path: Path) -> datetime:
    command = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().removeprefix("notAfter=")
    return datetime.strptime(said, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "client.pem", "stranger.pem"])
def test_the_end_is_the_one_of_the_certificate(name: str) -> None:
    assert ends_of_validity(str(CERTIFICATES / name))[0] == told_by_openssl(CERTIFICATES / name)


@pytest.mark.parametrize("days", [1, 3_650, 30_000])
def test_short_and_long_years(days: int, tmp_path: Path) -> None:
    made = tmp_path / "made.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", str(days)]
    subprocess.run([*command, "-keyout", str(tmp_path / "key"), "-out", str(made)], check=True, capture_output=True)
    assert ends_of_validity(str(made)) == [told_by_openssl(made)]


def test_of_a_chain_each_counts_and_the_servers_own_is_the_first(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text((CERTIFICATES / "server.pem").read_text() + (CERTIFICATES / "ca.pem").read_text())
    assert ends_of_validity(str(chain)) == [told_by_openssl(CERTIFICATES / name) for name in ("server.pem", "ca.pem")]


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text(text)
    with pytest.raises(ValueError, match=r"x\.pem"):
        ends_of_validity(str(tmp_path / "x.pem"))

"""When certificates are valid, as openssl says it."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollbridge.base.security import Validity, validities

CERTIFICATES = Path(__file__).parents[2] / "integration_tests/certificates"


def told_by_openssl(path: Path) -> Validity:
    command = ["openssl", "x509", "-in", str(path), "-noout", "-startdate", "-enddate"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    times = [line.partition("=")[2] for line in said]
    return Validity(*(datetime.strptime(item, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC) for item in times))


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "client.pem", "stranger.pem"])
def test_begin_and_end_are_those_of_the_certificate(name: str) -> None:
    assert validities(str(CERTIFICATES / name))[0] == told_by_openssl(CERTIFICATES / name)


@pytest.mark.parametrize("days", [1, 3_650, 30_000])
def test_short_and_long_years(days: int, tmp_path: Path) -> None:
    made = tmp_path / "made.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", str(days)]
    subprocess.run([*command, "-keyout", str(tmp_path / "key"), "-out", str(made)], check=True, capture_output=True)
    assert validities(str(made)) == [told_by_openssl(made)]


def test_of_a_chain_each_counts_and_the_servers_own_is_the_first(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text((CERTIFICATES / "server.pem").read_text() + (CERTIFICATES / "ca.pem").read_text())
    assert validities(str(chain)) == [told_by_openssl(CERTIFICATES / name) for name in ("server.pem", "ca.pem")]


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text(text)
    with pytest.raises(ValueError, match=r"x\.pem"):
        validities(str(tmp_path / "x.pem"))

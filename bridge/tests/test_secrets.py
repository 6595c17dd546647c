"""No secret shows in a ``repr``, a log line or an error; where it comes from, and what is wrong with it, is said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from kazoo.protocol.serialization import Auth, Connect, Create

from rollbridge.base.security import Quieter, Security, ZooKeeperSecurity
from rollbridge.config import ConnectionSettings, load_settings
from rollbridge.consumer.consumer import consumer_settings
from rollbridge.errors import ConfigError
from rollbridge.metadata.acls import digest_identity, parse_identity, shown
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.spark.settings import OptionReader, read_settings
from rollbridge_coordinator.config import load_coordinator_settings
from rollbridge_devcluster.state import write_privately

SECRET = "Hush-7f3a91"
KAFKA = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "alice",
    "sasl.password": SECRET,
}
ZOOKEEPER = {"digest.username": "alice", "digest.password": SECRET}
ADDRESSES = {"bootstrap.servers": "k:1", "zookeeper": "z:2"}
BESIDE_KAFKAS = {**KAFKA, **{f"zookeeper.{key}": value for key, value in ZOOKEEPER.items()}}
TOML = """
bootstrap_servers = "k:1"
zookeeper = "z:2"
[kafka]
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-256"
sasl.username = "alice"
sasl.password = "Hush-7f3a91"
[zookeeper_security]
digest.username = "alice"
digest.password = "Hush-7f3a91"
"""


def test_no_settings_show_secrets_and_all_pass_them_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    file.chmod(0o600)
    connection = load_settings(environ={"ROLLBRIDGE_CONFIG": str(file)})
    monkeypatch.setenv("ROLLBRIDGE_CONFIG", str(file))
    coordinator = load_coordinator_settings({})
    monkeypatch.delenv("ROLLBRIDGE_CONFIG")
    consumer = consumer_settings({**ADDRESSES, "group.id": "g", **BESIDE_KAFKAS})
    options = {"stream": "s/a", "kafka.bootstrap.servers": "k:1", "zookeeper": "z:2", "zookeeper.root": "/r"}
    options |= {f"kafka.{key}": value for key, value in KAFKA.items()}
    reader = OptionReader({**options, **{f"zookeeper.{key}": value for key, value in ZOOKEEPER.items()}})
    spark = read_settings(reader)
    reader.finish()
    assert spark is not None
    for known in (connection, spark.connection, consumer.connection, coordinator.connection):
        assert known.zookeeper_security == ZOOKEEPER
    assert connection.kafka == spark.connection.kafka == coordinator.connection.kafka == KAFKA
    things = (connection, coordinator, consumer, spark)
    adapters = (Security.from_config(KAFKA), ZooKeeperSecurity.from_config(ZOOKEEPER))
    session = ZooKeeperSession("z:2", security=ZOOKEEPER)
    for thing in (*things, *adapters, session):
        assert SECRET not in repr(thing)


def test_what_kazoo_logs_of_requests_leaves_passwords_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1, logger="kazoo.client")  # which others may have made quieter
    log = Quieter(logging.getLogger("kazoo.client"), {})
    secrets = [
        Auth(0, "digest", f"alice:{SECRET}"),
        Connect(0, 0, 10, 7, SECRET.encode(), False),  # a session's password opens the session to anybody
    ]
    for request in secrets:
        log.debug("Sending request(xid=%s): %s", 1, request)
    log.log(5, "session_passwd: %s", SECRET)
    log.debug("Sending request(xid=%s): %s", 2, Create("/a", b"", [], 0))
    log.warning("Connection dropped")
    ours = [record for record in caplog.records if record.thread == threading.get_ident()]
    said = [(record.levelname, record.getMessage()) for record in ours]
    assert SECRET not in str(said)
    assert [message for _, message in said[:2]] == [
        "Sending request(xid=1): Auth(...)",
        "Sending request(xid=1): Connect(...)",
    ]
    assert "path='/a'" in said[2][1]
    assert said[3] == ("INFO", "Connection dropped")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"digest.username": "alice"}, "digest.password: needed with the other one"),
        ({"digest.password": SECRET}, "digest.username: needed with the other one"),
        ({"digest.username": "a:b", "digest.password": SECRET}, "digest.username: is empty or holds a colon"),
        ({"security.protocol": "SASL_SSL"}, "SASL is not offered"),
        ({"security.protocol": "TLS"}, "security.protocol: 'TLS' is not one of"),
        ({"ssl.ca.location": "ca.pem"}, "ssl.ca.location: has no effect without security.protocol=SSL"),
        (
            {"security.protocol": "SSL", "ssl.key.location": "k.pem"},
            "ssl.certificate.location: needed with ssl.key.location",
        ),
    ],
)
def test_faulty_settings_of_zookeeper_are_named_without_their_secrets(given: Mapping[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionSettings(bootstrap_servers="k:1", zookeeper="z:2", zookeeper_security=given)
    assert f"zookeeper_security.{said.split(':')[0]}" in str(caught.value) or said in str(caught.value)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_unknown_settings_of_zookeeper_are_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"zookeeper_security.digest.pasword: .*did you mean digest.password\?"):
        ConnectionSettings(bootstrap_servers="k:1", zookeeper="z:2", zookeeper_security={"digest.pasword": SECRET})


def test_a_file_that_can_not_be_used_is_named_before_anything_is_tried() -> None:
    for key in ("ssl.ca.location", "ssl.certificate.location"):
        with pytest.raises(ConfigError, match=f"{key}.*/nowhere.pem"):
            ZooKeeperSession("z:2", security={"security.protocol": "SSL", key: "/nowhere.pem"})


def test_secrets_come_from_the_environment_and_from_files_that_it_names(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(f"{SECRET}\n")
    environ = {
        "ROLLBRIDGE_ZOOKEEPER_SECURITY_DIGEST_USERNAME": "alice",
        "ROLLBRIDGE_ZOOKEEPER_SECURITY_DIGEST_PASSWORD_FILE": str(secret),
        "ROLLBRIDGE_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "ROLLBRIDGE_KAFKA_SASL_MECHANISM": "SCRAM-SHA-256",
        "ROLLBRIDGE_KAFKA_SASL_USERNAME": "alice",
        "ROLLBRIDGE_KAFKA_SASL_PASSWORD_FILE": str(secret),
    }
    addresses = {"bootstrap_servers": "k:1", "zookeeper": "z:2"}
    settings = load_settings(addresses, environ=environ)
    assert (settings.kafka, settings.zookeeper_security) == (KAFKA, ZOOKEEPER)
    secret.unlink()
    with pytest.raises(ConfigError, match=r"ROLLBRIDGE_KAFKA_SASL_PASSWORD_FILE: .* cannot be read"):
        load_settings(addresses, environ=environ)
    for variable in ("ROLLBRIDGE_ZOOKEEPER_SECURITY_DIGEST_PASWORD", "ROLLBRIDGE_KAFKA_PLUGIN_FILE"):
        with pytest.raises(ConfigError, match=f"{variable}: is not a security setting"):
            load_settings(addresses, environ={variable: "x"})


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_with_secrets_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    file.chmod(mode)
    load_settings(config_file=file, environ={})
    assert ("others may read its passwords" in caplog.text) is warned
    assert SECRET not in caplog.text


def test_a_file_without_secrets_may_be_read_by_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.toml"
    file.write_text('bootstrap_servers = "k:1"\nzookeeper = "z:2"\n')
    file.chmod(0o644)
    load_settings(config_file=file, environ={})
    assert caplog.text == ""


def test_what_embedded_servers_are_told_is_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "server.properties"
    file.write_text("old")
    file.chmod(0o644)
    write_privately(file, SECRET)
    assert file.read_text() == SECRET
    assert file.stat().st_mode & 0o777 == 0o600


def test_identities_of_zookeeper() -> None:
    # echo -n alice:secret | openssl dgst -binary -sha1 | base64
    assert digest_identity("alice", "secret") == "digest:alice:aYXlLOpEooaV1cRAvUL1fp9Qt7E="
    identity = parse_identity(digest_identity("alice", SECRET))
    assert shown(identity) == "digest:alice"
    assert shown(parse_identity("x509:CN=a:b,O=c")) == "x509:CN=a:b,O=c"

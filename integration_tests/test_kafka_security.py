"""TLS and SASL against a real broker, with the same settings for our own connections and for librdkafka's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import cast

import pytest
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from integration_tests.adapter_tools import batch_of, read_values
from integration_tests.coordinators import until
from rollbridge.client.sender import FrameSender, Undelivered
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AuthenticationError, KafkaUnavailableError
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata.catalog import Catalog
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.routing import StreamView
from rollbridge.writer import StreamWriter, WriterOptions
from rollbridge.writer.sender import PlainSender
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.state import free_port

CERTIFICATES = Path(__file__).parent / "certificates"
CA = str(CERTIFICATES / "ca.pem")
USER, PASSWORD = "al=ice,the first", "hunter2"

PASSWORD_ONLY = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "bob",
    "sasl.password": PASSWORD,
}
TLS = {"security.protocol": "SSL", "ssl.ca.location": CA}
MUTUAL_TLS = {
    **TLS,
    "ssl.certificate.location": str(CERTIFICATES / "client.pem"),
    "ssl.key.location": str(CERTIFICATES / "client.key"),
    "ssl.key.password": "only-a-test",
}


def scram(mechanism: str, password: str = PASSWORD) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": CA,
        "sasl.mechanism": mechanism,
        "sasl.username": USER,
        "sasl.password": password,
    }


class Addresses:
    """One broker, listening in five ways."""

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}
        for name in ("PLAINTEXT", "CONTROLLER", "TLS", "MUTUAL", "PASSWORD", "SCRAM"):
            self._ports[name] = free_port(self._ports.values())

    def port(self, listener: str) -> int:
        return self._ports[listener]

    def __getitem__(self, listener: str) -> str:
        return f"127.0.0.1:{self._ports[listener]}"

    def listeners(self, *without: str) -> str:
        return ",".join(f"{name}://{self[name]}" for name in self._ports if name not in without)


@pytest.fixture(scope="module")
def broker() -> Iterator[Addresses]:
    addresses = Addresses()
    settings = {
        "controller.quorum.voters": f"1@{addresses['CONTROLLER']}",
        "listeners": addresses.listeners(),
        "advertised.listeners": addresses.listeners("CONTROLLER"),
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,TLS:SSL,MUTUAL:SSL,PASSWORD:SASL_PLAINTEXT,SCRAM:SASL_SSL"
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(CERTIFICATES / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": CA,
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.password.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.password.plain.sasl.jaas.config": (
            f'org.apache.kafka.common.security.plain.PlainLoginModule required user_bob="{PASSWORD}";'
        ),
        "listener.name.password.plain.connections.max.reauth.ms": "3000",
        "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.scram.scram-sha-512.connections.max.reauth.ms": "3000",
        **{
            f"listener.name.scram.{mechanism}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
            for mechanism in ("scram-sha-256", "scram-sha-512")
        },
    }
    with ProcessCluster(kafka_port=addresses.port("PLAINTEXT"), kafka_settings=settings):
        _create_scram_user(addresses["PLAINTEXT"])
        yield addresses


def _create_scram_user(servers: str) -> None:
    kinds = (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
    for kind in kinds:
        _set_password(servers, kind, PASSWORD)


def _set_password(servers: str, kind: ScramMechanism, password: str) -> None:
    change = UserScramCredentialUpsertion(USER, ScramCredentialInfo(kind, 4096), password.encode())
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.alter_user_scram_credentials([change]).values():
        future.result(120)


@pytest.mark.parametrize(
    ("listener", "security"),
    [
        ("TLS", TLS),
        ("MUTUAL", MUTUAL_TLS),
        ("PASSWORD", PASSWORD_ONLY),
        ("PASSWORD", {**PASSWORD_ONLY, "sasl.mechanisms": "PLAIN"}),
        ("SCRAM", scram("SCRAM-SHA-256")),
        ("SCRAM", scram("SCRAM-SHA-512")),
    ],
)
def test_the_same_settings_serve_appender_and_administration(
    broker: Addresses, topic_prefix: str, listener: str, security: dict[str, str]
) -> None:
    admin = KafkaClient(broker[listener], security=security).topics
    admin.create_topics([TopicSpec(name=topic_prefix)])
    large = bytes(700_000)
    with KafkaClient(broker[listener], security=security).appender(topic_prefix) as appender:
        appender.init()
        for n in range(3):
            appender.append((topic_prefix, batch_of([b"%d" % n, large])) for _ in range(2))
            appender.commit()
    admin.seal([topic_prefix])
    assert read_values(broker["PLAINTEXT"], topic_prefix) == [b"0", large] * 2 + [b"1", large] * 2 + [b"2", large] * 2


class OneStream:
    """A catalog that knows a stream of one segment; what it stands for needs a ZooKeeper, of which this is no test."""

    generation = 0

    def __init__(self, stream: str) -> None:
        name = StreamName.parse(stream)
        config = StreamConfig(name=name, group=GroupName(name.scope), created_ms=0, buffer_topic_id="")
        self._view = StreamView.of(config, EpochHistory.create(even_ranges(1), 0))
        self.topic = name.segment_topic(self._view.history.active.segments[0].id)

    def view(self, _: str) -> StreamView:
        return self._view

    read = view

    def suspect(self, _: str) -> None:
        raise AssertionError("nothing is sealed here")


@pytest.mark.parametrize(
    ("listener", "security", "said"),
    [
        ("SCRAM", scram("SCRAM-SHA-256", "wrong"), "refused our credentials"),
        ("SCRAM", scram("PLAIN"), r"does not offer PLAIN, but SCRAM-SHA-\d+, SCRAM-SHA-\d+"),
        ("PASSWORD", {**PASSWORD_ONLY, "sasl.password": "wrong"}, "refused our credentials"),
        ("PASSWORD", {**PASSWORD_ONLY, "sasl.mechanism": "SCRAM-SHA-512"}, "does not offer SCRAM-SHA-512, but PLAIN"),
        ("TLS", {**TLS, "ssl.ca.location": str(CERTIFICATES / "stranger.pem")}, "cannot trust the certificate"),
        ("PLAINTEXT", TLS, "TLS handshake"),
    ],
)
def test_who_is_not_trusted_is_told_so_without_secrets(
    broker: Addresses, listener: str, security: dict[str, str], said: str
) -> None:
    with KafkaClient(broker[listener], security=security).appender("t") as appender:
        with pytest.raises(AuthenticationError, match=said) as refused:
            appender.init()
        assert "wrong" not in str(refused.value)
        assert "wrong" not in repr(appender)


def test_a_certificate_for_another_name_is_trusted_only_if_told_to(broker: Addresses) -> None:
    by_name = f"localhost:{broker.port('TLS')}"
    with (
        KafkaClient(by_name, security=TLS).appender("t") as appender,
        pytest.raises(AuthenticationError, match=r"Hostname mismatch|not valid for"),
    ):
        appender.init()
    lenient = {**TLS, "ssl.endpoint.identification.algorithm": "none"}
    with KafkaClient(by_name, security=lenient).appender("t") as appender:
        appender.init()


def test_a_broker_that_wants_a_certificate_gets_none(broker: Addresses) -> None:
    # With TLS 1.3 the handshake is over for the client before the server looks for its certificate.
    with (
        KafkaClient(broker["MUTUAL"], security=TLS).appender("t", retry_timeout_ms=0) as appender,
        pytest.raises((AuthenticationError, KafkaUnavailableError)),
    ):
        appender.init()


def test_credentials_that_have_to_be_renewed_are(broker: Addresses, topic_prefix: str) -> None:
    """The broker closes connections whose authentication is older than three seconds; transactions go on."""
    KafkaClient(broker["PLAINTEXT"]).topics.create_topics([TopicSpec(name=topic_prefix)])
    with KafkaClient(broker["PASSWORD"], security=PASSWORD_ONLY).appender(topic_prefix) as appender:
        appender.init()
        started = time.monotonic()
        written: list[bytes | None] = []
        while time.monotonic() - started < 7:
            written.append(b"%d" % len(written))
            appender.append([(topic_prefix, batch_of([b"%d" % (len(written) - 1)]))])
            appender.commit()
    assert read_values(broker["PLAINTEXT"], topic_prefix) == written


def test_a_sender_outlives_a_password_that_was_refused_for_a_while(
    broker: Addresses, unique_name: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is too old by then, so that it needs another one, which it does not get."""
    caplog.set_level(logging.INFO, "rollbridge.kafka.dispatch")
    catalog = OneStream(unique_name("scope") + "/orders")
    topic = unique_name("frames")
    KafkaClient(broker["PLAINTEXT"]).topics.create_topics([TopicSpec(name=catalog.topic), TopicSpec(name=topic)])
    security = scram("SCRAM-SHA-512")
    frames = FrameSender(KafkaClient(broker["SCRAM"], security=security))
    delivered: Queue[Undelivered | None] = Queue()
    engine = PlainSender(
        KafkaClient(broker["SCRAM"], security=security, client_id="secure"),
        WriterOptions(linger_s=0.001),
        cast("Catalog", catalog),
    )
    writer = StreamWriter(engine, engine.channel("s/orders"))
    try:
        writer.write(b"k", b"before").result(120)
        frames.send(topic, 0, b"k", b"before", delivered.put)
        assert delivered.get(timeout=120) is None
        _set_password(broker["PLAINTEXT"], ScramMechanism.SCRAM_SHA_512, "another")
        try:
            links = [link for sender in (frames, engine) for link in sender._dispatch.links.values()]
            until(lambda: not any(link.connection.usable() for link in links))
            future = writer.write(b"k", b"meanwhile")
            frames.send(topic, 0, b"k", b"meanwhile", delivered.put)
            until(lambda: caplog.text.count("refused our credentials") > 4)
            assert not future.done()
        finally:
            _set_password(broker["PLAINTEXT"], ScramMechanism.SCRAM_SHA_512, PASSWORD)
        future.result(120)
        assert delivered.get(timeout=120) is None
    finally:
        writer.close()
        assert engine.close(30) == 0
        assert frames.close(30) == 0
    assert read_values(broker["PLAINTEXT"], catalog.topic) == [b"before", b"meanwhile"]
    assert read_values(broker["PLAINTEXT"], topic) == [b"before", b"meanwhile"]

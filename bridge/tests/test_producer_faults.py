"""Our errors as confluent-kafka's, and confluent-kafka's settings as ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from rollbridge import errors
from rollbridge.client.runtime import ClientOptions
from rollbridge.errors import (
    BackpressureError,
    ConfigError,
    FencedError,
    IncompleteError,
    KafkaUnavailableError,
    OutcomeUnknownError,
    RollbridgeError,
    StreamNotFoundError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionExpiredError,
)
from rollbridge.model import errors as model_errors
from rollbridge.producer.messages import as_kafka_error, kafka_exceptions
from rollbridge.producer.settings import ProducerSettings

WITHOUT_A_COUNTERPART = {
    "RollbridgeError",
    "CorruptDataError",
    "LocalEnvironmentError",
    "NewerFormatError",
    "UnknownWriteError",
    "ZooKeeperOutdatedError",
}
CLASSES = [
    item
    for item in vars(errors).values()
    if inspect.isclass(item)
    and issubclass(item, RollbridgeError)
    and item.__module__ in {errors.__name__, model_errors.__name__}
]


def made(kind: type[RollbridgeError]) -> RollbridgeError:
    """One of each class, whatever its constructor wants."""
    wanted: list[inspect.Parameter] = []
    if inspect.isfunction(kind.__init__):
        wanted = [item for item in inspect.signature(kind).parameters.values() if item.kind is item.KEYWORD_ONLY]
    values: dict[str, Any] = {item.name: 1 if item.annotation == "int" else "x" for item in wanted}
    return kind("what happened", **values)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_a_counterpart(kind: type[RollbridgeError]) -> None:
    fault = as_kafka_error(made(kind))
    assert (fault.code() == KafkaError._FAIL) == (kind.__name__ in WITHOUT_A_COUNTERPART)
    assert "what happened" in fault.str()


@pytest.mark.parametrize(
    ("fault", "retriable", "abortable", "fatal"),
    [
        (OutcomeUnknownError("x", transaction="t"), True, False, False),
        (KafkaUnavailableError("x"), True, False, False),
        (TransactionAbortedError("x", transaction="t", reason="client"), False, True, False),
        (TransactionExpiredError("x", transaction="t", reason="expired"), False, True, False),
        (IncompleteError("x"), False, True, False),
        (TransactionCommittedError("x", transaction="t"), False, False, False),
        (FencedError("x"), False, False, True),
        (StreamNotFoundError("x"), False, False, False),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_code_that_catches_them_asks(
    fault: RollbridgeError, retriable: bool, abortable: bool, fatal: bool
) -> None:
    error = as_kafka_error(fault)
    assert (error.retriable(), error.txn_requires_abort(), error.fatal()) == (retriable, abortable, fatal)


@pytest.mark.parametrize("name", ["ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "FENCED_INSTANCE_ID"])
def test_refused_offsets_keep_the_code_of_kafka(name: str) -> None:
    reason = f"offsets of consumer group g were refused: {name}"
    assert as_kafka_error(TransactionAbortedError("x", transaction="t", reason=reason)).name() == name


def refuse(fault: Exception) -> None:
    with kafka_exceptions():
        raise fault


def test_a_full_queue_is_a_buffer_error_and_the_rest_kafka_exceptions() -> None:
    with pytest.raises(BufferError):
        refuse(BackpressureError("full"))
    with pytest.raises(KafkaException) as raised:
        refuse(StreamNotFoundError("gone"))
    assert isinstance(raised.value.__cause__, StreamNotFoundError)
    with pytest.raises(TypeError):
        refuse(TypeError("not ours"))


def test_settings_keep_their_meaning() -> None:
    read = ProducerSettings.read(
        {
            "bootstrap.servers": "b:1",
            "zookeeper": "z:2",
            "client.id": "c",
            "linger.ms": "20",
            "batch.size": 65_536,
            "compression.codec": "lz4",
            "queue.buffering.max.kbytes": 8192,
            "delivery.timeout.ms": 1_000,
            "transaction.timeout.ms": 60_000,
            "acks": "all",
            "enable.idempotence": "true",
            "sasl.mechanism": "PLAIN",
            "transaction.streams": "s/a, s/b",
            "retries": 5,
        }
    )
    assert (read.bootstrap_servers, read.zookeeper, read.client_name, read.transactional) == ("b:1", "z:2", "c", False)
    writer = read.writer
    assert (writer.linger_s, writer.batch_bytes, writer.compression) == (0.02, 65_536, "lz4")
    assert (writer.buffer_bytes, writer.delivery_timeout_s) == (8 << 20, 1.0)
    assert read.client.lease.total_seconds() == 60
    assert read.security == {"sasl.mechanism": "PLAIN"}
    assert read.streams == ("s/a", "s/b")


def test_without_settings_the_defaults_are_ours_or_confluent_kafkas() -> None:
    read = ProducerSettings.read({"transactional.id": "t", "client.id": "c"})
    assert (read.client_name, read.transactional, read.streams) == ("t", True, ())
    assert read.client.lease == ClientOptions().lease
    assert (read.writer.linger_s, read.writer.delivery_timeout_s) == (0.005, 300.0)


def test_all_faults_of_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        ProducerSettings.read({"plugin.library.paths": "x", "acks": 0, "linger.ms": "soon", "group.id": "g"})
    for name in ("plugin.library.paths", "acks", "linger.ms", "group.id"):
        assert name in str(refused.value)

"""confluent-kafka's settings of a producer: those that are taken, and what becomes of them.

A setting that is not listed is refused, and so is one that asks for less than we promise; one that only tunes
librdkafka has nothing to tune here and is taken without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from rollbridge.client.admin import Admin
from rollbridge.client.runtime import ClientOptions
from rollbridge.errors import ConfigError, StreamNotFound
from rollbridge.kafka.clients import PRODUCER_KEYS
from rollbridge.security.kafka import SECURITY_KEYS
from rollbridge.security.zookeeper import PREFIXED_KEYS, take_prefixed
from rollbridge.writer.accumulator import WriterOptions

logger = logging.getLogger(__name__)

_OWN: Final = frozenset(
    {
        "bootstrap.servers",
        "metadata.broker.list",
        "zookeeper",
        "zookeeper.root",
        "client.id",
        "transactional.id",
        "transaction.timeout.ms",
        "transaction.streams",
        "linger.ms",
        "queue.buffering.max.ms",
        "batch.size",
        "compression.type",
        "compression.codec",
        "queue.buffering.max.kbytes",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "request.timeout.ms",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "on_delivery",
        "dr_cb",
        "delivery.report.only.error",
        "enable.idempotence",
        "acks",
        "request.required.acks",
        "allow.auto.create.topics",
    }
)
_WITHOUT_EFFECT: Final = PRODUCER_KEYS | {
    "api.version.request",
    "debug",
    "enable.gapless.guarantee",
    "error_cb",
    "logger",
    "message.send.max.retries",
    "partitioner",
    "queue.buffering.backpressure.threshold",
    "retries",
    "stats_cb",
    "throttle_cb",
    "topic.metadata.refresh.interval.ms",
}
CALLBACKS: Final = frozenset({"on_delivery", "dr_cb", "error_cb", "stats_cb", "throttle_cb"})
"""Settings whose names have no dots."""
_BATCH_BYTES_MAX: Final = 1024 * 1024
_BUFFER_BYTES_MIN: Final = 4 * 1024 * 1024
_LEASE: Final = ClientOptions().lease
_NEVER_BLOCK_S: Final = 0.001
"""A full queue is a BufferError at once, as in confluent-kafka."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Settings of a producer, read from confluent-kafka's names.

    Attributes:
        bootstrap_servers, zookeeper, zookeeper_root, security, zookeeper_security: How to connect; see
            :func:`rollbridge.connect`.
        client_name: The transactional id, or the client id, or None.
        transactional: Whether transactions may be begun.
        streams: Streams of each transaction; empty for all of the group.
        client, writer: Sizes, delays and limits.
        on_delivery: Called for records that bring no callback of their own.
        only_errors: Whether callbacks are called for failed records only.
    """

    bootstrap_servers: str | None
    zookeeper: str | None
    zookeeper_root: str | None
    security: Mapping[str, str] = field(repr=False)
    zookeeper_security: Mapping[str, str] = field(repr=False)
    client_name: str | None
    transactional: bool
    streams: tuple[str, ...]
    client: ClientOptions
    writer: WriterOptions
    on_delivery: Callable[..., object] | None
    only_errors: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ProducerSettings:
        """Read them.

        Raises:
            ConfigError: names every setting that is not taken.
        """
        faults = list(_faults(config))
        if faults:
            raise ConfigError("; ".join(faults))
        for key in sorted(config.keys() & _WITHOUT_EFFECT - _OWN):
            logger.info("%s has no effect here", key)
        lease_ms = _number(config, 0.0, "transaction.timeout.ms")
        buffer_bytes = max(int(_number(config, 65_536, "queue.buffering.max.kbytes") * 1024), _BUFFER_BYTES_MIN)
        compression = str(config.get("compression.type", config.get("compression.codec", "none")))
        client = ClientOptions(
            compression=compression,
            buffer_bytes=buffer_bytes,
            backpressure_timeout_s=_NEVER_BLOCK_S,
            lease=timedelta(milliseconds=lease_ms) if lease_ms else _LEASE,
        )
        writer = WriterOptions(
            linger_s=_number(config, 5.0, "linger.ms", "queue.buffering.max.ms") / 1000,
            batch_bytes=min(max(int(_number(config, _BATCH_BYTES_MAX, "batch.size")), 1024), client.frame_bytes),
            compression=compression,
            buffer_bytes=buffer_bytes,
            block_s=_NEVER_BLOCK_S,
            delivery_timeout_s=_number(config, 300_000.0, "message.timeout.ms", "delivery.timeout.ms") / 1000,
            request_timeout_s=_number(config, 30_000.0, "request.timeout.ms") / 1000,
            in_flight_max=min(int(_number(config, 5, "max.in.flight", "max.in.flight.requests.per.connection")), 5),
        )
        streams = config.get("transaction.streams", ())
        names = streams.split(",") if isinstance(streams, str) else streams
        name = config.get("transactional.id") or config.get("client.id")
        return cls(
            bootstrap_servers=config.get("bootstrap.servers", config.get("metadata.broker.list")),
            zookeeper=config.get("zookeeper"),
            zookeeper_root=config.get("zookeeper.root"),
            security={key: str(config[key]) for key in SECURITY_KEYS & config.keys()},
            zookeeper_security=take_prefixed(config),
            client_name=None if name is None else str(name),
            transactional=bool(config.get("transactional.id")),
            streams=tuple(name.strip() for name in names if name.strip()),
            client=client,
            writer=writer,
            on_delivery=config.get("on_delivery", config.get("dr_cb")),
            only_errors=_flag(config.get("delivery.report.only.error", False)),
        )


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(config.keys() - _OWN - SECURITY_KEYS - PREFIXED_KEYS - _WITHOUT_EFFECT):
        yield f"{key}: not a setting of this producer"
    if not _flag(config.get("enable.idempotence", True)):
        yield "enable.idempotence: every write is idempotent, which can not be switched off"
    if str(config.get("acks", config.get("request.required.acks", "all"))) not in ("all", "-1"):
        yield "acks: a record is acknowledged by all replicas in sync; only all is possible"
    if _flag(config.get("allow.auto.create.topics", False)):
        yield "allow.auto.create.topics: streams are created by rollbridge.Admin"
    for key, value in config.items():
        if key.endswith((".ms", ".size", ".kbytes")) and key in _OWN:
            try:
                if float(value) < 0:
                    yield f"{key}: {value} is negative"
            except (TypeError, ValueError):
                yield f"{key}: {value!r} is not a number"
    for key in ("on_delivery", "dr_cb"):
        if config.get(key) is not None and not callable(config[key]):
            yield f"{key}: can not be called"


def _number(config: Mapping[str, Any], default: float, *keys: str) -> float:
    return next((float(config[key]) for key in keys if key in config), default)


def _flag(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")


# --------------------------------------------------------------------------------------------------------------------
# Streams in the shape of confluent-kafka's metadata, for code that asks which topics there are.


@dataclass(frozen=True, slots=True)
class PartitionView:
    """An active segment."""

    id: int
    """Its partition number."""
    topic: str
    """The Kafka topic that holds it."""


@dataclass(frozen=True, slots=True)
class TopicView:
    """A stream."""

    topic: str
    partitions: dict[int, PartitionView]
    error: None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All streams, or the one asked for."""

    topics: dict[str, TopicView] = field(default_factory=dict)


def describe_streams(admin: Admin, stream: str | None) -> ClusterView:
    """The streams with their active segments.

    Raises:
        StreamNotFound: there is none of this name.
    """
    names = [str(config.name) for config in admin.list_streams()] if stream is None else [stream]
    found = {}
    for name in names:
        try:
            description = admin.describe(name)
        except StreamNotFound:
            if stream is not None:
                raise
            continue  # deleted meanwhile
        config = description.config
        found[name] = TopicView(
            name,
            {
                description.partitions[item.id]: PartitionView(
                    description.partitions[item.id], config.name.segment_topic(item.id)
                )
                for item in description.active.segments
            },
        )
    return ClusterView(found)

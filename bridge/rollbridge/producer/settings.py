"""Configuration of :class:`rollbridge.Producer`: confluent-kafka's settings that are accepted, and their effect.

A setting that is not listed is refused, and so is one that weakens a guarantee; settings that only tune librdkafka
have an effect on plain topics alone, to which its own producer writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from rollbridge.client.runtime import ClientOptions
from rollbridge.config import ClientAddresses
from rollbridge.errors import ConfigError
from rollbridge.kafka.batches import BUFFER_BYTES_MIN, Compression
from rollbridge.kafka.clients import PRODUCER_KEYS, Config
from rollbridge.model.options import KIB, MIB, function, keys_of, option, unknown, values_of, words
from rollbridge.security.kafka import SECURITY_KEYS
from rollbridge.security.zookeeper import PREFIXED_KEYS, take_prefixed
from rollbridge.writer.accumulator import WriterOptions

logger = logging.getLogger(__name__)

_OF_PLAIN_TOPICS: Final = PRODUCER_KEYS | {
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
_DEFAULTS: Final = ClientOptions()
_NEVER_BLOCK_S: Final = 0.001
"""Time-out of a full queue in s: raise ``BufferError`` at once, as in confluent-kafka."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions(ClientAddresses):
    """Settings of confluent-kafka's that rollbridge carries out itself, and ``transaction.streams``."""

    bootstrap_servers: str | None = option(None, key="bootstrap.servers", aliases=("metadata.broker.list",))
    """Kafka: ``host:port,...``"""
    transactional_id: str | None = option(None, key="transactional.id")
    """Name of the client, before ``client.id``; required for transactions."""
    lease_ms: int = option(
        0, key="transaction.timeout.ms", low=0, high=_DEFAULTS.lease_max // timedelta(milliseconds=1)
    )
    """Longest time that a transaction may stay open, in ms; 0: as ``ClientOptions`` say."""
    streams: tuple[str, ...] = option((), key="transaction.streams", convert=words)
    """Streams that transactions may write to, a list or comma-separated names; if left out, any of one group."""
    linger_ms: float = option(5.0, key="linger.ms", aliases=("queue.buffering.max.ms",), low=0, high=900_000)
    """Time in ms that a record waits for others to share its batch."""
    batch_size: int = option(MIB, key="batch.size", low=0)
    """Largest batch before compression, in bytes; raised to 1 KiB and limited to 1 MiB."""
    compression: str = option("none", key="compression.type", aliases=("compression.codec",), check=Compression.named)
    """Codec of the batches: none, gzip, snappy, lz4 or zstd."""
    buffer_kbytes: int = option(65_536, key="queue.buffering.max.kbytes", low=0)
    """KiB that may wait for the brokers, at least 4 MiB; beyond that ``produce`` raises ``BufferError``."""
    delivery_timeout_ms: float = option(300_000.0, key="message.timeout.ms", aliases=("delivery.timeout.ms",))
    """Time in ms without an answer after which a record fails."""
    request_timeout_ms: float = option(30_000.0, key="request.timeout.ms")
    """Time in ms without an answer to a request after which its connection is given up."""
    in_flight: int = option(5, key="max.in.flight", aliases=("max.in.flight.requests.per.connection",), low=1)
    """Most requests in flight to one broker; more than 5 count as 5."""
    on_delivery: Callable[..., object] | None = option(None, aliases=("dr_cb",), convert=function)
    """Callback for records that bring none of their own."""
    only_errors: bool = option(False, key="delivery.report.only.error")
    """Call callbacks for failed records only."""
    idempotent: bool = option(
        True,
        key="enable.idempotence",
        choices=dict.fromkeys(("true", "yes", "1"), True),
        why="every write is idempotent, which cannot be switched off",
    )
    """Idempotence; every write is idempotent."""
    acks: str = option(
        "all",
        aliases=("request.required.acks",),
        choices=("all", "-1"),
        why="a record is acknowledged by all replicas in sync; only all is possible",
    )
    """Acknowledgement by all replicas in sync."""
    makes_topics: bool = option(
        False,
        key="allow.auto.create.topics",
        choices=dict.fromkeys(("false", "no", "0"), False),
        why="streams are created by rollbridge.Admin",
    )
    """Creation of topics; streams are created by ``Admin``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings(ProducerOptions):
    """Settings of a producer, read from confluent-kafka's names.

    Attributes:
        security, zookeeper_security: Credentials and TLS; see :func:`rollbridge.connect`.
        client, writer: Sizes, delays and limits.
        native: Settings of librdkafka for plain topics, without addresses and credentials.
        log: Receiver of librdkafka's messages, if one was given.
    """

    security: Mapping[str, str] = field(repr=False)
    zookeeper_security: Mapping[str, str] = field(repr=False)
    client: ClientOptions
    writer: WriterOptions
    native: Config = field(repr=False)
    log: logging.Logger | None = None

    @property
    def transactional(self) -> bool:
        """True if transactions may be begun."""
        return bool(self.transactional_id)

    @property
    def client_name(self) -> str | None:
        """The transactional id, or else the client id, or None."""
        return self.transactional_id or self.client_id

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ProducerSettings:
        """Read and check a configuration.

        Raises:
            ConfigError: Settings are not accepted; the error names all of them.
        """
        own = keys_of(ProducerOptions)
        known = own | SECURITY_KEYS | PREFIXED_KEYS | _OF_PLAIN_TOPICS
        faults = list(unknown(config, known, "not a setting of this producer"))
        values = values_of(ProducerOptions, config, faults)
        ConfigError.raise_for(faults)
        for key in sorted(config.keys() & _OF_PLAIN_TOPICS - own):
            logger.info("%s has an effect on plain topics only", key)
        options = ProducerOptions(**values)
        buffer_bytes = max(options.buffer_kbytes * KIB, BUFFER_BYTES_MIN)
        client = ClientOptions(
            compression=options.compression,
            buffer_bytes=buffer_bytes,
            backpressure_timeout_s=_NEVER_BLOCK_S,
            lease=timedelta(milliseconds=options.lease_ms) if options.lease_ms else _DEFAULTS.lease,
        )
        writer = WriterOptions(
            linger_s=options.linger_ms / 1000,
            batch_bytes=min(max(options.batch_size, KIB), client.frame_bytes),
            compression=options.compression,
            buffer_bytes=buffer_bytes,
            block_s=_NEVER_BLOCK_S,
            delivery_timeout_s=options.delivery_timeout_ms / 1000,
            request_timeout_s=options.request_timeout_ms / 1000,
            in_flight_max=min(options.in_flight, 5),
        )
        return cls(
            **values,
            security={key: str(config[key]) for key in SECURITY_KEYS & config.keys()},
            zookeeper_security=take_prefixed(config),
            client=client,
            writer=writer,
            native={
                "linger.ms": options.linger_ms,
                **{key: config[key] for key in config.keys() & _OF_PLAIN_TOPICS - {"logger"}},
                "compression.type": options.compression,
                "delivery.report.only.error": options.only_errors,
            },
            log=config.get("logger"),
        )

"""The configuration of :class:`rollbridge.Consumer`: confluent-kafka's names, checked against a list of those allowed.

Settings that load code (``plugin.library.paths``) or undo what is promised are refused by name, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, Final

from rollbridge.config import ClientAddresses, ConnectionSettings, load_settings
from rollbridge.errors import ConfigError
from rollbridge.kafka.clients import CONSUMER_KEYS, Config, consumer_config
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.options import filled, function, keys_of, option, unknown, values_of
from rollbridge.model.reader_group import Reset
from rollbridge.security.kafka import SECURITY_KEYS
from rollbridge.security.zookeeper import PREFIXED_KEYS, take_prefixed

_COOPERATIVE: Final = "cooperative-sticky"
_DAY_MS: Final = 86_400_000
_CALLBACKS: Final = frozenset({"error_cb", "stats_cb", "throttle_cb"})
"""Functions that librdkafka is handed as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(ClientAddresses):
    """Those of confluent-kafka's settings that are ours to carry out."""

    group_id: str = option(MISSING, key="group.id", check=filled)
    """The consumer group."""
    instance_id: str | None = option(None, key="group.instance.id")
    """Name of a member that keeps its segments while it is away for a moment."""
    reset: Reset = option(
        Reset.LATEST,
        key="auto.offset.reset",
        choices={
            **dict.fromkeys(("latest", "largest", "end"), Reset.LATEST),
            **dict.fromkeys(("earliest", "smallest", "beginning"), Reset.EARLIEST),
            "error": Reset.ERROR,
        },
    )
    """Where a group begins that has committed nothing."""
    isolation: str = option(
        "read_committed",
        key="isolation.level",
        choices=("read_committed",),
        why="a group reads committed records only; Bridge.reader(isolation='read_uncommitted') previews those of open "
        "transactions",
    )
    """Only committed records are read."""
    assignor: str = option(
        _COOPERATIVE,
        key="partition.assignment.strategy",
        choices=(_COOPERATIVE, "roundrobin"),
        why=f"{_COOPERATIVE} and roundrobin are; 'range' would give every segment to the same member, since each is a "
        "topic of one partition",
    )
    """How segments are shared out among the members."""
    auto_commit: bool = option(True, key="enable.auto.commit")
    """Commit by itself, at intervals, what was handed out."""
    interval_ms: int = option(5_000, key="auto.commit.interval.ms", low=1, high=_DAY_MS)
    """The interval."""
    auto_store: bool = option(True, key="enable.auto.offset.store")
    """A record counts as processed once the application asks for the next one; otherwise by ``store_offsets``."""
    show_ends: bool = option(False, key="enable.partition.eof")
    """Hand out ``_PARTITION_EOF`` events."""
    api_timeout_ms: int = option(60_000, key="default.api.timeout.ms", low=1, high=_DAY_MS)
    """How long a commit that is waited for may take. Kafka's name in Java."""
    on_commit: Callable[..., None] | None = option(None, convert=function)
    """Called after each commit with its error, or None, and the partitions."""

    @property
    def cooperative(self) -> bool:
        """Whether members keep what they have while others come and go."""
        return self.assignor == _COOPERATIVE

    @property
    def is_static(self) -> bool:
        """Whether the member keeps its segments while it is away for a moment."""
        return self.instance_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(ConsumerOptions):
    """What a consumer was told, checked; ``kafka`` is what confluent-kafka is told."""

    connection: ConnectionSettings
    kafka: Config = field(repr=False)


def consumer_settings(config: Mapping[str, Any]) -> ConsumerSettings:
    """Check a configuration; addresses that are missing come from where :func:`rollbridge.connect` finds them.

    Raises:
        ConfigError: settings that are unknown, not allowed or wrong; all are named.
    """
    faults = list(unknown(config, _ALLOWED, "may not be set here"))
    values = values_of(ConsumerOptions, config, faults)
    ConfigError.raise_for(faults)
    options = ConsumerOptions(**values)
    connection = load_settings(
        {
            "bootstrap_servers": options.bootstrap_servers,
            "zookeeper": options.zookeeper,
            "zookeeper_root": options.zookeeper_root,
            "client_name": options.client_id,
        }
    )
    connection = replace(connection, zookeeper_security={**connection.zookeeper_security, **take_prefixed(config)})
    kafka = consumer_config(
        connection.bootstrap_servers,
        isolation=Isolation.READ_COMMITTED,
        group_id=options.group_id,
        security={**connection.kafka, **{key: str(config[key]) for key in SECURITY_KEYS & set(config)}},
        client_id=connection.client_name,
        extra={"fetch.queue.backoff.ms": 5, **{key: config[key] for key in CONSUMER_KEYS & set(config)}},
    )
    kafka |= {
        "enable.partition.eof": True,
        "partition.assignment.strategy": options.assignor,
        # Offsets to begin at are always given. This is for those that were deleted: what is left is read, whatever a
        # new group begins with, since to go to the end would skip records that are still there.
        "auto.offset.reset": "error" if options.reset is Reset.ERROR else "earliest",
        **{key: config[key] for key in _CALLBACKS & set(config)},
    }
    if options.instance_id is not None:
        kafka["group.instance.id"] = options.instance_id
    return ConsumerSettings(**values, connection=connection, kafka=kafka)


_ALLOWED: Final = keys_of(ConsumerOptions) | _CALLBACKS | SECURITY_KEYS | PREFIXED_KEYS | CONSUMER_KEYS

"""Configuration of :class:`rollbridge.Consumer`: confluent-kafka's names, checked against a list of those allowed.

Settings that load code (``plugin.library.paths``) or undo a guarantee are refused by name, all at once.
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
"""Functions that are passed on to librdkafka."""
_PLAIN_NAMES: Final = _CALLBACKS | {"on_commit", "on_delivery", "dr_cb", "logger"}
"""Settings whose names have no dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(ClientAddresses):
    """Settings of confluent-kafka's that rollbridge carries out itself."""

    group_id: str = option(MISSING, key="group.id", check=filled)
    """Consumer group."""
    instance_id: str | None = option(None, key="group.instance.id")
    """Name of a static member, which keeps its segments through a short absence."""
    reset: Reset = option(
        Reset.LATEST,
        key="auto.offset.reset",
        choices={
            **dict.fromkeys(("latest", "largest", "end"), Reset.LATEST),
            **dict.fromkeys(("earliest", "smallest", "beginning"), Reset.EARLIEST),
            "error": Reset.ERROR,
        },
    )
    """Start of a group that has committed nothing."""
    isolation: str = option(
        "read_committed",
        key="isolation.level",
        choices=("read_committed",),
        why="a group reads committed records only; Bridge.reader(isolation='read_uncommitted') previews those of open "
        "transactions",
    )
    """Isolation level; only committed records are read."""
    assignor: str = option(
        _COOPERATIVE,
        key="partition.assignment.strategy",
        choices=(_COOPERATIVE, "roundrobin"),
        why=f"{_COOPERATIVE} and roundrobin are; 'range' would give every segment to the same member, since each is a "
        "topic of one partition",
    )
    """Assignment of segments to members."""
    auto_commit: bool = option(True, key="enable.auto.commit")
    """Commit at intervals what was handed out."""
    interval_ms: int = option(5_000, key="auto.commit.interval.ms", low=1, high=_DAY_MS)
    """Interval between automatic commits, in ms."""
    auto_store: bool = option(True, key="enable.auto.offset.store")
    """Count a record as processed once the application asks for the next one; otherwise by ``store_offsets``."""
    show_ends: bool = option(False, key="enable.partition.eof")
    """Hand out ``_PARTITION_EOF`` events."""
    api_timeout_ms: int = option(60_000, key="default.api.timeout.ms", low=1, high=_DAY_MS)
    """Timeout of a synchronous commit, in ms. The name is that of Kafka's Java client."""
    on_commit: Callable[..., None] | None = option(None, convert=function)
    """Callback after each commit, with its error, or None, and the partitions."""

    @property
    def cooperative(self) -> bool:
        """True if members keep their segments while others join and leave."""
        return self.assignor == _COOPERATIVE

    @property
    def is_static(self) -> bool:
        """True if the member keeps its segments through a short absence."""
        return self.instance_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(ConsumerOptions):
    """Checked settings of a consumer; ``kafka`` is the configuration for confluent-kafka."""

    connection: ConnectionSettings
    kafka: Config = field(repr=False)


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were given as keyword arguments, by their names."""
    return {key if key in _PLAIN_NAMES else key.replace("_", "."): value for key, value in settings.items()}


def consumer_settings(config: Mapping[str, Any]) -> ConsumerSettings:
    """Check a configuration; missing addresses come from where :func:`rollbridge.connect` finds them.

    Raises:
        ConfigError: Settings are unknown, not allowed or wrong; the error names all of them.
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
        extra={**_DEFAULTS, **{key: config[key] for key in CONSUMER_KEYS & set(config)}},
    )
    kafka |= {
        "enable.partition.eof": True,
        "partition.assignment.strategy": options.assignor,
        # Start offsets are always explicit, so this setting only applies to deleted ones: reading goes on with what is
        # left, whatever a new group begins with, since going to the end would skip records that are still there.
        "auto.offset.reset": "error" if options.reset is Reset.ERROR else "earliest",
        **{key: config[key] for key in _CALLBACKS & set(config)},
    }
    if options.instance_id is not None:
        kafka["group.instance.id"] = options.instance_id
    return ConsumerSettings(**values, connection=connection, kafka=kafka)


_DEFAULTS: Final[Config] = {"fetch.queue.backoff.ms": 5, "topic.metadata.refresh.interval.ms": 10_000}
"""Where they differ from the library's. Partitions that were added to a topic are shared out once they are seen."""
_ALLOWED: Final = keys_of(ConsumerOptions) | _CALLBACKS | SECURITY_KEYS | PREFIXED_KEYS | CONSUMER_KEYS

"""The configuration of :class:`rollbridge.Consumer`: confluent-kafka's names, checked against a list of those allowed.

Settings that load code (``plugin.library.paths``) or undo what is promised are refused by name, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rollbridge.config import ConnectionSettings, load_settings
from rollbridge.errors import ConfigError
from rollbridge.kafka.clients import CONSUMER_KEYS, Config, consumer_config
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.reader_group import Reset
from rollbridge.security.kafka import SECURITY_KEYS
from rollbridge.security.zookeeper import PREFIXED_KEYS, take_prefixed

_RESETS: Final = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), Reset.EARLIEST),
    **dict.fromkeys(("latest", "largest", "end"), Reset.LATEST),
    "error": Reset.ERROR,
}
_ASSIGNORS: Final = ("cooperative-sticky", "roundrobin")
_OWN: Final = frozenset(
    {
        "auto.commit.interval.ms",
        "auto.offset.reset",
        "bootstrap.servers",
        "client.id",
        "default.api.timeout.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "isolation.level",
        "partition.assignment.strategy",
        "zookeeper",
        "zookeeper.root",
    }
)
_CALLBACKS: Final = frozenset({"error_cb", "on_commit", "stats_cb", "throttle_cb"})
_AUTO_COMMIT_MS: Final = 5_000
_AUTO_COMMIT_MS_MAX: Final = 86_400_000
_API_TIMEOUT_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """What a consumer was told, checked; ``kafka`` is what confluent-kafka is told."""

    connection: ConnectionSettings
    group_id: str
    reset: Reset
    auto_commit: bool
    """Commit by itself, at intervals, what was handed out."""
    auto_store: bool
    """A record counts as processed once the application asks for the next one; otherwise by ``store_offsets``."""
    interval_s: float
    show_ends: bool
    """Hand out ``_PARTITION_EOF`` events."""
    cooperative: bool
    api_timeout_s: float
    """How long a commit that is waited for may take. ``default.api.timeout.ms``, Kafka's name in Java."""
    on_commit: Callable[..., None] | None
    kafka: Config = field(repr=False)

    @property
    def is_static(self) -> bool:
        """Whether the member keeps its segments while it is away for a moment."""
        return "group.instance.id" in self.kafka


def consumer_settings(config: Mapping[str, Any]) -> ConsumerSettings:
    """Check a configuration; addresses that are missing come from where :func:`rollbridge.connect` finds them.

    Raises:
        ConfigError: settings that are unknown, not allowed or wrong; all are named.
    """
    faults = [f"{key}: may not be set here" for key in sorted(set(config) - _ALLOWED)]

    def flag(key: str, default: bool) -> bool:
        value = str(config.get(key, default)).lower()
        if value not in ("true", "false"):
            faults.append(f"{key}: {config[key]!r} is neither true nor false")
        return value == "true"

    group_id = config.get("group.id")
    if not isinstance(group_id, str) or not group_id:
        faults.append("group.id: is needed, and is the name of the consumer group")
    reset = _RESETS.get(str(config.get("auto.offset.reset", "latest")))
    if reset is None:
        faults.append(f"auto.offset.reset: {config['auto.offset.reset']!r} is none of {', '.join(sorted(_RESETS))}")
    if config.get("isolation.level", "read_committed") != "read_committed":
        faults.append(
            "isolation.level: a group reads committed records only; Bridge.reader(isolation='read_uncommitted') "
            "previews those of open transactions"
        )
    assignor = config.get("partition.assignment.strategy", _ASSIGNORS[0])
    if assignor not in _ASSIGNORS:
        faults.append(
            f"partition.assignment.strategy: {assignor!r} is none of {', '.join(_ASSIGNORS)}; 'range' would give every "
            "segment to the same member, since each is a topic of one partition"
        )
    interval_ms = config.get("auto.commit.interval.ms", _AUTO_COMMIT_MS)
    if not str(interval_ms).isdigit() or not 1 <= int(interval_ms) <= _AUTO_COMMIT_MS_MAX:
        faults.append(f"auto.commit.interval.ms: {interval_ms!r} is not in 1..{_AUTO_COMMIT_MS_MAX}")
        interval_ms = _AUTO_COMMIT_MS
    api_timeout_ms = config.get("default.api.timeout.ms", _API_TIMEOUT_MS)
    if not str(api_timeout_ms).isdigit() or not 1 <= int(api_timeout_ms) <= _AUTO_COMMIT_MS_MAX:
        faults.append(f"default.api.timeout.ms: {api_timeout_ms!r} is not in 1..{_AUTO_COMMIT_MS_MAX}")
        api_timeout_ms = _API_TIMEOUT_MS
    flags = {
        key: flag(key, default)
        for key, default in (
            ("enable.auto.commit", True),
            ("enable.auto.offset.store", True),
            ("enable.partition.eof", False),
        )
    }
    if faults:
        raise ConfigError("; ".join(faults))
    connection = load_settings(
        {
            "bootstrap_servers": config.get("bootstrap.servers"),
            "zookeeper": config.get("zookeeper"),
            "zookeeper_root": config.get("zookeeper.root"),
            "client_name": config.get("client.id"),
        }
    )
    connection = replace(connection, zookeeper_security={**connection.zookeeper_security, **take_prefixed(config)})
    security = {**connection.kafka, **{key: str(config[key]) for key in SECURITY_KEYS & set(config)}}
    kafka = consumer_config(
        connection.bootstrap_servers,
        isolation=Isolation.READ_COMMITTED,
        group_id=str(group_id),
        security=security,
        client_id=connection.client_name,
        extra={"fetch.queue.backoff.ms": 5, **{key: config[key] for key in CONSUMER_KEYS & set(config)}},
    )
    kafka |= {
        "enable.partition.eof": True,
        "partition.assignment.strategy": assignor,
        # Offsets to begin at are always given. This is for those that were deleted: what is left is read, whatever a
        # new group begins with, since to go to the end would skip records that are still there.
        "auto.offset.reset": "error" if reset is Reset.ERROR else "earliest",
        **{key: config[key] for key in (_CALLBACKS - {"on_commit"}) & set(config)},
    }
    if "group.instance.id" in config:
        kafka["group.instance.id"] = config["group.instance.id"]
    return ConsumerSettings(
        connection=connection,
        group_id=str(group_id),
        reset=reset or Reset.LATEST,
        auto_commit=flags["enable.auto.commit"],
        auto_store=flags["enable.auto.offset.store"],
        interval_s=int(interval_ms) / 1000,
        api_timeout_s=int(api_timeout_ms) / 1000,
        show_ends=flags["enable.partition.eof"],
        cooperative=assignor == _ASSIGNORS[0],
        on_commit=config.get("on_commit"),
        kafka=kafka,
    )


_ALLOWED: Final = _OWN | _CALLBACKS | SECURITY_KEYS | PREFIXED_KEYS | CONSUMER_KEYS

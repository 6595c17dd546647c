"""Settings of the librdkafka clients used across the project, built in one place so that none is forgotten.

Users may pass through only the librdkafka settings listed here: others change what we promise, and one
(``plugin.library.paths``) loads code.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Message

from rollbridge.base.logs import limited_child
from rollbridge.base.security import SECURITY_KEYS, Security
from rollbridge.errors import ConfigError
from rollbridge.kafka.errors import translate
from rollbridge.kafka.metadata import Isolation, parse_bootstrap

# `list_topics` would import this on whichever thread calls it first. A fork during that import leaves the child waiting
# for the import lock forever.
import_module("confluent_kafka.admin")

Config = dict[str, Any]

TICK_S: Final = 0.001
"""Shortest wait to ask of the library, which waits for whole milliseconds: a shorter one would spin."""

_SHARED: Final = frozenset(
    {
        "client.dns.lookup",
        "client.rack",
        "broker.address.family",
        "broker.address.ttl",
        "connections.max.idle.ms",
        "log_level",
        "metadata.max.age.ms",
        "metadata.recovery.rebootstrap.trigger.ms",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.receive.buffer.bytes",
        "socket.send.buffer.bytes",
        "socket.timeout.ms",
        "statistics.interval.ms",
    }
)
CONSUMER_KEYS: Final = _SHARED | {
    "fetch.error.backoff.ms",
    "fetch.max.bytes",
    "fetch.message.max.bytes",
    "fetch.min.bytes",
    "fetch.queue.backoff.ms",
    "fetch.wait.max.ms",
    "heartbeat.interval.ms",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "receive.message.max.bytes",
    "session.timeout.ms",
    "topic.metadata.refresh.interval.ms",
}

_RECOVERY: Final[Config] = {"metadata.recovery.rebootstrap.trigger.ms": 2_000}
"""Time after which the library returns to ``bootstrap.servers``, by default 5 minutes. A broker that stood still for
longer than its session briefly reports no brokers at all, itself included, and the library then forgets those that it
knew. Without any other request in flight it never returns."""


def _base(bootstrap_servers: str, security: Mapping[str, str] | None, client_id: str) -> Config:
    parse_bootstrap(bootstrap_servers)
    Security.from_config(security)
    return {
        "bootstrap.servers": bootstrap_servers,
        "client.id": client_id,
        "socket.nagle.disable": True,  # every request is complete, and a caller waits for it
        **(security or {}),
    }


def _checked(extra: Mapping[str, Any] | None, allowed: frozenset[str], kind: str) -> Mapping[str, Any]:
    extra = extra or {}
    refused = sorted(set(extra) - allowed)
    if refused:
        hint = " (security settings are given apart)" if SECURITY_KEYS & set(refused) else ""
        raise ConfigError(f"not allowed as {kind} settings: {', '.join(refused)}{hint}")
    return extra


def consumer_config(
    bootstrap_servers: str,
    *,
    isolation: Isolation,
    group_id: str = "rollbridge",
    security: Mapping[str, str] | None = None,
    client_id: str = "rollbridge",
    extra: Mapping[str, Any] | None = None,
) -> Config:
    """Return the settings of a Consumer that commits nothing by itself; ``isolation`` has no default, since they vary.

    Meant for ``assign()``, where the library requires a ``group_id`` but does not use it. Assign numeric offsets: to
    look up ``OFFSET_BEGINNING``, librdkafka first waits half a second.

    Raises:
        ConfigError: A setting is wrong or may not be passed through.
    """
    return {
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 5,
        **_RECOVERY,
        **_checked(extra, CONSUMER_KEYS, "consumer"),
        **_base(bootstrap_servers, security, client_id),
        "group.id": group_id,
        "isolation.level": isolation.name.lower(),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
        "check.crcs": True,
        "enable.partition.eof": False,
    }


def open_consumer(config: Mapping[str, Any], doing: str, log: logging.Logger) -> Consumer:
    """Open a Consumer whose library logs to ``log``; translate its errors to ours, with ``doing`` as the attempt."""
    try:
        return Consumer(dict(config), logger=limited_child(log))
    except (KafkaException, ValueError, TypeError) as fault:
        raise translate(fault, doing) from fault


# Headers of messages

# If a name is not UTF-8, confluent-kafka returns a list whose tuples have holes and sets an exception as well.
# Looking into that list ends the process (SIGSEGV), and so does asking the message again. The interpreter notices
# the exception only outside its fast path for method calls; a call through methodcaller does not take that path.
_ask_for_headers = operator.methodcaller("headers")
UNREADABLE: Final[list[tuple[str, Any]]] = [("", None)]
"""Replacement for headers that confluent-kafka cannot decode, as an object."""


def get_headers(message: Message) -> list[tuple[str, Any]] | None:
    """Return the headers of a message; :data:`UNREADABLE` if a name is not UTF-8, which rollbridge never writes."""
    try:
        found: list[tuple[str, Any]] | None = _ask_for_headers(message)
    except (SystemError, UnicodeDecodeError):
        message.set_headers(UNREADABLE)
        return UNREADABLE
    return found

"""Consumer groups that read a stream which has grown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.grown_streams import KEYS
from rollbridge.consumer.consumer import dotted
from rollbridge.consumer.records import Message

GROWN = len(KEYS) * 4


class Group:
    """Makes members of one group."""

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self.name = name

    def config(self, **settings: Any) -> dict[str, Any]:
        return {
            "bootstrap.servers": self._site.cluster.bootstrap_servers,
            "zookeeper": self._site.cluster.zookeeper,
            "zookeeper.root": self._site.root,
            "group.id": self.name,
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 200,  # by which members learn of each other; the default is 3 s
            **dotted(settings),
        }

    @contextmanager
    def member(self, *streams: str, **settings: Any) -> Iterator[rollbridge.Consumer]:
        with rollbridge.Consumer(self.config(**settings)) as consumer:
            if streams:
                consumer.subscribe(list(streams))
            yield consumer


def take(consumer: rollbridge.Consumer, count: int, into: list[Message] | None = None) -> list[Message]:
    """Read until there are so many messages."""
    found: list[Message] = [] if into is None else into

    def enough() -> bool:
        found.extend(consumer.consume(100, 0.5))
        return len(found) >= count

    until(enough)
    assert all(message.error() is None for message in found)
    return found


def values(messages: list[Message]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for message in messages:
        found.setdefault(message.key() or b"", []).append(message.value() or b"")
    return found

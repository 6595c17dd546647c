"""Streams by the names of topics that producers know them by, as they were last read."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollbridge.connection import Bridge
from rollbridge.errors import NothingServedError
from rollbridge.model.gateways import LackingRight
from rollbridge.model.names import GroupName
from rollbridge.model.records import StreamConfig

REFRESH_S: Final = 5.0
"""Age at which the list of streams is read again."""
MISS_S: Final = 0.5
"""Shortest interval in which it is read again for names that it does not have."""


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """Streams that producers may write to.

    Attributes:
        streams: Stream, ``scope/stream``, by the name of its topic: an adopted one, or ``scope.stream``.
        virtual: Names that are no topics of the brokers'.
        buffers: A topic of rollbridge's own of each stream, whose rights are those of the stream.
        groups: Name of a stream of each transaction group.
    """

    streams: Mapping[str, str]
    virtual: frozenset[str]
    buffers: Mapping[str, str]
    groups: Mapping[str, str]


def known_of(configs: list[StreamConfig]) -> KnownTopic:
    """Return streams by their topics."""
    streams: dict[str, str] = {}
    virtual: set[str] = set()
    buffers: dict[str, str] = {}
    groups: dict[str, str] = {}
    for config in configs:
        name = str(config.name)
        topic = config.topic or f"{config.name.scope}.{config.name.stream}"
        streams[topic] = name
        buffers[topic] = config.buffer_topic
        groups.setdefault(str(config.group), name)
        if not config.topic:
            virtual.add(topic)
    return KnownTopic(streams, frozenset(virtual), buffers, groups)


class Topics:
    """Cache of the streams of a connection. Safe to use from several threads; :meth:`read` waits for ZooKeeper."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._lock = threading.Lock()
        self._read_s = float("-inf")
        self.known = known_of([])

    def is_fresh(self, age_s: float = REFRESH_S) -> bool:
        """Return whether the list is younger than that."""
        return time.monotonic() - self._read_s < age_s

    def read(self, age_s: float = REFRESH_S) -> KnownTopic:
        """Return the streams, read again if the list is older than that.

        Raises:
            ZooKeeperUnavailableError: they could not be read.
        """
        with self._lock:
            if not self.is_fresh(age_s):
                self._read()
            return self.known

    def needs(self) -> list[LackingRight]:
        """Return what a gateway needs in Kafka for the streams that it knows, as if it lacked all of it."""
        known = self.known
        found = [LackingRight("Write", known.buffers[topic], stream) for topic, stream in known.streams.items()]
        logs = {group: GroupName.parse(group).commit_log_topic for group in known.groups}
        return found + [LackingRight("Read", logs[group], stream) for group, stream in known.groups.items()]

    def stream_of(self, topic: str) -> str | None:
        """Return the stream of a topic; None if there is none by now. May wait, for others ask as well."""
        found = self.known.streams.get(topic)
        if found is not None:
            return found
        asked_s = time.monotonic()
        with self._lock:
            if self._read_s < asked_s:  # nobody has looked since
                pause_s = self._read_s + MISS_S - time.monotonic()
                if pause_s > 0:
                    time.sleep(pause_s)
                self._read()
            return self.known.streams.get(topic)

    def _read(self) -> None:
        began_s = time.monotonic()
        try:
            self.known = known_of(self._bridge.admin.list_streams())
        except NothingServedError:
            self.known = known_of([])  # the first coordinator is still to come
        self._read_s = began_s

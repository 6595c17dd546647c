"""Streams by the names of topics that producers know them by, as they were last read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from rollbridge.base.deadlines import answers_within
from rollbridge.base.errors import NOTHING_SERVED
from rollbridge.client.connection import Bridge
from rollbridge.errors import RollbridgeError
from rollbridge.metadata.gateways import LackingRight
from rollbridge.metadata.records import TopicNames
from rollbridge.stream.config import StreamConfig

logger = logging.getLogger(__name__)

REFRESH_S: Final = 5.0
"""Age at which the list of streams is read again."""
LIST_S: Final = 10.0
"""Longest wait for ZooKeeper, in less than what clients wait for an answer."""
MISS_S: Final = 0.5
"""Shortest interval in which it is read again for names that it does not have."""
_THERE: Final = (ErrorCode.none, ErrorCode.leader_not_available)


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """Streams that producers may write to.

    Attributes:
        streams: Stream, ``scope/stream``, by the name of its topic: an adopted one, or ``scope.stream``.
        virtual: Names that are no topics of the brokers'.
        buffers: A topic of rollbridge's own of each stream, whose rights are those of the stream.
        groups: Name of a stream of each transaction group.
        group_of: Transaction group by stream.
        logs: Commit log of each transaction group.
        clashes: Stream by the name of its virtual topic, where brokers have a topic of that name, which wins.
    """

    streams: Mapping[str, str]
    virtual: frozenset[str]
    buffers: Mapping[str, str]
    groups: Mapping[str, str]
    group_of: Mapping[str, str]
    logs: Mapping[str, str]
    clashes: Mapping[str, str]


def known_of(configs: Iterable[StreamConfig], at_brokers: Collection[str]) -> KnownTopic:
    """Return streams by their topics; ``at_brokers`` are those of their names which the brokers have as topics."""
    names = TopicNames.of(configs, at_brokers)
    return KnownTopic(
        streams={topic: str(config.name) for topic, config in names.streams.items()},
        virtual=frozenset(topic for topic, config in names.streams.items() if not config.topic),
        buffers={topic: config.buffer_topic for topic, config in names.streams.items()},
        groups={str(config.group): str(config.name) for config in names.streams.values()},
        group_of={str(config.name): str(config.group) for config in names.streams.values()},
        logs={str(config.group): config.group.commit_log_topic for config in names.streams.values()},
        clashes={topic: str(config.name) for topic, config in names.clashes.items()},
    )


class Topics:
    """Cache of the streams of a connection. Safe to use from several threads; :meth:`read` waits for ZooKeeper."""

    def __init__(self, bridge: Bridge, look: Callable[[Collection[str]], Iterable[Any]]) -> None:
        """Start without any; ``look`` gives what brokers answer to Metadata about names of topics."""
        self._bridge = bridge
        self._look = look
        self._lock = threading.Lock()
        self._read_s = self._failed_s = float("-inf")
        self._fault: RollbridgeError | None = None
        self._configs: Collection[StreamConfig] = ()
        self._at_brokers: frozenset[str] = frozenset()
        self.known = known_of((), ())

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

    def look(self) -> None:
        """Find out which names of streams are topics of the brokers; readers of the list do not wait for that.

        A request for one of them looks it up at once, on the client's own connection.
        """
        names = self.known.virtual | self.known.clashes.keys()
        try:
            self.saw(self._look(names) if names else ())
        except RollbridgeError as fault:
            logger.warning("topics.unknown: brokers do not list them: %s", fault)

    def needs(self) -> list[LackingRight]:
        """Return what a gateway needs in Kafka for the streams that it knows, as if it lacked all of it."""
        known = self.known
        found = [LackingRight("Write", known.buffers[topic], stream) for topic, stream in known.streams.items()]
        found += [LackingRight("Describe", topic, known.streams[topic]) for topic in known.virtual]
        return found + [LackingRight("Read", known.logs[group], stream) for group, stream in known.groups.items()]

    def saw(self, answers: Iterable[Any]) -> None:
        """Note which topics brokers have, by an answer to Metadata; of what is not to be described it says nothing."""
        codes = {str(item.name): item.error_code for item in answers}
        missing = {name for name, code in codes.items() if code is ErrorCode.unknown_topic_or_partition}
        there = {name for name, code in codes.items() if code in _THERE}
        names = {config.name.virtual_topic for config in self._configs}
        self._at_brokers = ((self._at_brokers - missing) | there) & names
        self._note()

    def stream_of(self, topic: str) -> str | None:
        """Return the stream of a topic; None if there is none by now. May wait, for others ask as well."""
        found = self.known.streams.get(topic)
        if found is not None:
            return found
        asked_s = time.monotonic()
        with self._lock:
            if self._read_s < asked_s:  # the list was not read since
                pause_s = self._read_s + MISS_S - time.monotonic()
                if pause_s > 0:
                    time.sleep(pause_s)
                self._read()
            return self.known.streams.get(topic)

    def _read(self) -> None:
        began_s = time.monotonic()
        if self._fault is not None and began_s - self._failed_s < REFRESH_S:
            raise self._fault.with_traceback(None)  # or else each who waits would wait for as long as the one before
        configs = self._listed()
        self._fault = None
        self._configs = configs
        self._note()
        self._read_s = began_s

    def _listed(self) -> list[StreamConfig]:
        try:
            with answers_within(LIST_S):
                return self._bridge.admin.list_streams()
        except RollbridgeError as fault:
            if fault.code == NOTHING_SERVED:
                return []  # the first coordinator is still to come
            self._fault, self._failed_s = fault, time.monotonic()
            logger.warning("streams.unlisted: requests for topics wait: %s", fault)
            raise

    def _note(self) -> None:
        before = self.known.clashes
        self.known = known_of(self._configs, self._at_brokers)
        for topic in self.known.clashes.keys() - before.keys():
            stream = self.known.clashes[topic]
            logger.warning("topic.clash topic=%s stream=%s: producers reach the topic of that name", topic, stream)

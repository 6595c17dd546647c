"""Readers of an adopted topic notice what its owner has done to it, so that they miss nothing and mix up nothing.

A topic that was created again has other records under the old offsets. Readers check the topic when they begin. After
that they learn of it by the fault that the leader of the stream's group writes, see ``streams/adopt.py`` of the
coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollbridge.errors import ConflictError, RollbridgeError, StreamRecreatedError, TruncatedError
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.metadata.changes import TOPIC_RECREATED
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import StreamName

Watch = Callable[[], None]

BREAKING: Final = (ConflictError, TruncatedError)
"""Errors after which a reader hands out nothing any more; others are over some time."""


class TopicGuard:
    """Check of adopted topics by the readers of one connection. Thread-safe."""

    def __init__(self, metadata: Metadata, topics: TopicAdmin) -> None:
        self._metadata = metadata
        self._topics = topics

    def check(self, stream: StreamName, history: EpochHistory, changed: Watch | None, *, look: bool) -> None:
        """Raise if the topic that a stream has adopted is not what was adopted.

        Args:
            stream: The stream, whether it has adopted a topic or not.
            history: Its epochs; nothing is asked of a topic of which the stream keeps nothing.
            changed: Called once when the answer may be another one.
            look: Ask the brokers, too, instead of the leader only, who looks at the topic at intervals.

        Raises:
            StreamRecreatedError: It was deleted and created again.
            TruncatedError: It was deleted.
            KafkaUnavailableError, ZooKeeperUnavailableError, NotAuthorizedError.
        """
        config = self._metadata.stream(stream)
        if config is None or not any(map(config.places.is_adopted, history.stored())):
            return
        if config.is_on_topic(history.active):
            self._check(config, changed, look=look)
        elif look and self._is_another(config):
            raise TruncatedError(
                f"topic {config.topic} was deleted after stream {stream} had left it, with the records that were still "
                "to be read; the stream continues behind them: read again in a minute"
            )

    def check_offsets(self, stream: StreamName, changed: Watch | None) -> None:
        """Raise if the offsets of the adopted topic may be those of other records.

        Raises:
            StreamRecreatedError, TruncatedError, KafkaUnavailableError, ZooKeeperUnavailableError: As :meth:`check`.
        """
        config = self._metadata.stream(stream)
        if config is not None and config.topic:
            self._check(config, changed, look=True)

    def _check(self, config: StreamConfig, changed: Watch | None, *, look: bool) -> None:
        fault = self._metadata.stream_fault(config.name, changed)
        if fault is not None and fault.is_lost:
            raise _error(config, fault.code)
        if look and self._is_another(config):
            raise _error(config, TOPIC_RECREATED)

    def _is_another(self, config: StreamConfig) -> bool:
        """Return whether brokers know another topic of the name; a missing one may be unknown to some of them only."""
        found = self._topics.look([config.topic]).get(config.topic)
        return found is not None and str(found.topic_id) != config.topic_id


def _error(config: StreamConfig, code: str) -> RollbridgeError:
    topic, stream = config.topic, config.name
    remedy = (
        f"release the topic and adopt it again (rollbridge stream release {topic}, rollbridge stream adopt {topic})"
    )
    if code == TOPIC_RECREATED:
        return StreamRecreatedError(
            f"topic {topic} was deleted and created again since stream {stream} has adopted it, so its offsets are "
            f"those of other records; nothing more was read: {remedy}, and read from its beginning"
        )
    return TruncatedError(
        f"topic {topic}, which stream {stream} has adopted, was deleted, with the records that were still to be read: "
        f"release it (rollbridge stream release {topic})"
    )

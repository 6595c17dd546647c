"""Readers of an adopted topic notice what its owner has done to it, so that they miss nothing and mix up nothing.

A topic that was created anew has other records under the offsets of the old one; of one with more partitions, the added
ones are not part of the stream. Readers look at the topic when they begin. From then on they are told by the fault that
the leader of the stream's group writes, see ``procedures.adoption`` of the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Final

from rollbridge.errors import ConflictError, RollbridgeError, StreamRecreatedError, TruncatedError
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model.changes import TOPIC_DELETED, TOPIC_GROWN, TOPIC_RECREATED
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.names import StreamName
from rollbridge.model.records import StreamConfig
from rollbridge.zookeeper.metadata import Metadata

Watch = Callable[[], None]

BREAKING: Final = (ConflictError, TruncatedError)
"""Errors after which a reader hands out nothing any more; others are over some time."""


class TopicGuard:
    """Check of adopted topics by the readers of one connection. Thread-safe."""

    def __init__(
        self, metadata: Metadata, bootstrap_servers: str, *, security: Mapping[str, str] | None, client_id: str
    ) -> None:
        self._metadata = metadata
        self._connect = partial(TopicAdmin, bootstrap_servers, security=security, client_id=client_id)

    def check(self, stream: StreamName, history: EpochHistory, changed: Watch | None, *, look: bool) -> None:
        """Raise if the topic that a stream has adopted is not, or not only, what was adopted.

        Args:
            stream: The stream, whether it has adopted a topic or not.
            history: Its epochs; nothing is asked of a topic of which the stream keeps nothing.
            changed: Called once when the answer may be another one.
            look: Ask the brokers, too, instead of the leader only, who looks at the topic at intervals.

        Raises:
            ConflictError: The topic has more partitions now.
            StreamRecreatedError: It was deleted and created again.
            TruncatedError: It was deleted.
            KafkaUnavailableError, ZooKeeperUnavailableError, NotAuthorizedError.
        """
        config = self._metadata.stream(stream)
        if config is None or not any(map(config.places.is_adopted, history.stored())):
            return
        self._check(config, changed, look=look, active=history.active.epoch == config.first_epoch)

    def check_offsets(self, stream: StreamName, changed: Watch | None) -> None:
        """Raise if the offsets of the adopted topic may be those of other records; added partitions do not matter.

        Raises:
            StreamRecreatedError, TruncatedError, KafkaUnavailableError, ZooKeeperUnavailableError: As :meth:`check`.
        """
        config = self._metadata.stream(stream)
        if config is not None and config.topic:
            self._check(config, changed, look=True, active=False)

    def _check(self, config: StreamConfig, changed: Watch | None, *, look: bool, active: bool) -> None:
        codes = {TOPIC_DELETED, TOPIC_RECREATED} | ({TOPIC_GROWN} if active else set())
        fault = self._metadata.stream_fault(config.name, changed)
        if fault is not None and fault.code in codes:
            raise _error(config, fault.code)
        if look:
            code = self._look(config)
            if code in codes:
                raise _error(config, code)

    def _look(self, config: StreamConfig) -> str:
        """Return the code of what brokers say of a topic; a missing one may be unknown to some of them only."""
        with closing(self._connect()) as topics:
            found = topics.look([config.topic]).get(config.topic)
        if found is None:
            return ""
        if str(found.topic_id) != config.topic_id:
            return TOPIC_RECREATED
        return TOPIC_GROWN if found.partitions != config.partitions else ""


def _error(config: StreamConfig, code: str) -> RollbridgeError:
    topic, stream = config.topic, config.name
    remedy = (
        f"release the topic and adopt it again (rollbridge stream release {topic}, rollbridge stream adopt {topic})"
    )
    if code == TOPIC_GROWN:
        return ConflictError(
            f"topic {topic} has other partitions than the {config.partitions} that stream {stream} has adopted: "
            f"records in the others are not part of the stream, so a reader would miss them; nothing more was read: "
            f"{remedy}"
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

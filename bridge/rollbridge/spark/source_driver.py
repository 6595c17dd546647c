"""What the driver knows of a stream while it is read: its epochs, how far it can be read, and what was deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from rollbridge.client.introduction import find_cluster_id, own_name
from rollbridge.config import ConnectionSettings
from rollbridge.consumer.start import beginning, locate, readable_ends, since
from rollbridge.errors import GroupMismatchError, NotFoundError, TruncatedError
from rollbridge.kafka.log_offsets import LogOffsets
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.position import At, Latest, ReadPosition, Since, parse_start
from rollbridge.model.routing import StreamView
from rollbridge.model.truncation import consistent, frontier
from rollbridge.spark.offsets import StreamOffset
from rollbridge.spark.planning import (
    Front,
    OffsetRange,
    unsealed,
    without_beyond,
    without_lost,
    without_unknown,
)
from rollbridge.spark.settings import SparkSettings
from rollbridge.spark.source_options import FAIL_ON_DATA_LOSS
from rollbridge.zookeeper.catalog import Catalog
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession

logger = logging.getLogger(__name__)


class DriverConnection:
    """ZooKeeper and Kafka as a source's driver needs them: nothing is ever written.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answered in time.
        WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
    """

    def __init__(self, settings: SparkSettings) -> None:
        self.connection: ConnectionSettings = settings.connected_as(settings.client_name or own_name())
        options = settings.options
        self._session = ZooKeeperSession(
            self.connection.zookeeper,
            root=self.connection.zookeeper_root,
            session_timeout_s=options.session_timeout_s,
            name=self.connection.client_name,
            security=self.connection.zookeeper_security,
        )
        self._session.start(options.connect_timeout_s)
        try:
            self.cluster_id = find_cluster_id(self.connection, options.connect_timeout_s)
            self.metadata = Metadata(self._session)
            if self.metadata.cluster() is not None:  # a path that nobody has used stays as it is
                self.metadata.claim_cluster(self.cluster_id)
            self._session.sync()
        except BaseException:
            self._session.close()
            raise
        self.offsets = LogOffsets(
            self.connection.bootstrap_servers, security=self.connection.kafka, client_id=self.connection.client_name
        )

    def close(self) -> None:
        """Disconnect."""
        self._session.close()


class StreamDriver:
    """One stream; not for several threads."""

    def __init__(self, connection: DriverConnection, settings: SparkSettings, stream: StreamName) -> None:
        """Look the stream up.

        Raises:
            ScopeNotFound, StreamNotFound, GroupMismatchError, ZooKeeperUnavailable.
        """
        self.stream = stream
        self._connection = connection
        self._catalog = Catalog(connection.metadata, lambda: None)
        self._reached: dict[SegmentId, int] = {}
        """Up to where the logs of segments have been seen to reach."""
        group = self.view().config.group
        if settings.group is not None and settings.group != group:
            raise GroupMismatchError(f"stream {stream} belongs to group {group}, not to {settings.group}")

    def view(self) -> StreamView:
        """The stream as it is, or was a moment ago; raises StreamNotFound once it is gone."""
        self._catalog.refresh()
        return self._catalog.view(str(self.stream))

    def offset(self, front: Front, commit_log: int | None = None) -> StreamOffset:
        """A front as it stands in a checkpoint."""
        return StreamOffset(
            self._connection.cluster_id,
            self.view().config.buffer_topic_id,
            ReadPosition(self.stream, front),
            commit_log,
        )

    def start(self, text: str) -> Front:
        """The front that the option ``startingOffsets`` means now.

        Raises:
            InvalidRequestError, TruncatedError: it can not be begun there.
            KafkaUnavailable, NotFoundError.
        """
        history, offsets = self.view().history, self._connection.offsets
        match parse_start(self.stream, text):
            case Latest():
                return readable_ends(offsets, self.stream, history, Isolation.READ_COMMITTED)
            case Since(ms):
                stored = {self.stream.segment_topic(segment): segment for segment in history.stored()}
                return frontier(history, consistent(history, since(offsets, stored, ms)))
            case At() as at:
                return locate(offsets, self.stream, history, at).start or at.offsets
            case _:
                return beginning(offsets, self.stream, history).offsets

    def look(self) -> tuple[EpochHistory, dict[SegmentId, int]]:
        """The epochs, and how far those segments can be read whose end is not known from their seal in just these.

        Raises:
            KafkaUnavailable, NotFoundError.
        """
        history = self.view().history
        try:
            return history, self._ends(unsealed(history), Isolation.READ_COMMITTED)
        except NotFoundError:
            history = self._read_again()
            return history, self._ends(unsealed(history), Isolation.READ_COMMITTED)

    def _ends(self, segments: Iterable[SegmentId], isolation: Isolation) -> dict[SegmentId, int]:
        topics = {self.stream.segment_topic(segment): segment for segment in segments}
        found = self._connection.offsets.end(topics, isolation) if topics else {}
        ends = {topics[topic]: offset for topic, offset in found.items()}
        self._reached |= {segment: max(end, self._reached.get(segment, 0)) for segment, end in ends.items()}
        return ends

    def _read_again(self) -> EpochHistory:
        """The epochs from ZooKeeper: a segment was removed; says so if it was the stream."""
        self._catalog.read(str(self.stream))
        return self.view().history

    def known(self, front: Front, *, fail: bool) -> Front:
        """The front itself; or, if it names segments of which nothing is known any more, where to go on.

        Raises:
            TruncatedError: it does, and may not.
        """
        found, lost = without_unknown(self.view().history, front)
        self._judge(lost, fail=fail)
        return found

    def within(self, front: Front, ends: Mapping[SegmentId, int], *, fail: bool) -> Front:
        """The front itself; or, where logs end before it, their ends.

        Raises:
            TruncatedError: they do, and may not.
        """
        beyond = {segment for segment, offset in front.items() if offset > ends.get(segment, offset)}
        if not beyond:
            return front
        # An open transaction holds readers back, so that a query may begin behind what can be read now.
        found, lost = without_beyond(front, self._ends(beyond, Isolation.READ_UNCOMMITTED))
        self._judge(lost, fail=fail)
        return found

    def stored(self, ranges: list[OffsetRange], *, fail: bool) -> list[OffsetRange]:
        """What is left of ranges.

        Raises:
            TruncatedError: not everything, and that may not be.
            KafkaUnavailable.
        """
        try:
            first = self._first(ranges)
        except NotFoundError:
            self._read_again()
            first = self._first(ranges)
        # Only of what was planned by an earlier run it is not known yet that it was there.
        doubtful = {item.segment for item in ranges if item.end > self._reached.get(item.segment, 0)}
        self._ends(doubtful & first.keys(), Isolation.READ_UNCOMMITTED)
        left, lost = without_lost(ranges, first, self.view().history.removed, self._reached)
        self._judge(lost, fail=fail)
        return left

    def _first(self, ranges: Iterable[OffsetRange]) -> Mapping[SegmentId, int]:
        removed = self.view().history.removed
        wanted = [item.segment for item in ranges if item.segment not in removed]
        topics = {self.stream.segment_topic(segment): segment for segment in wanted}
        return {topics[topic]: offset for topic, offset in self._connection.offsets.first(topics).items()}

    def _judge(self, lost: list[str], *, fail: bool) -> None:
        if not lost:
            return
        judge_loss(f"records of {self.stream} that were still to be read are lost: {'; '.join(lost)}", fail=fail)


def judge_loss(what: str, *, fail: bool) -> None:
    """Say what was lost.

    Raises:
        TruncatedError: that may not be.
    """
    if fail:
        raise TruncatedError(
            f"{what}; nothing was read: with the option {FAIL_ON_DATA_LOSS}=false the query goes on at what is left"
        )
    logger.warning("%s; going on at what is left, because of %s=false", what, FAIL_ON_DATA_LOSS)

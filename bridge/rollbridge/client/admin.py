"""Admin requests: create, scale and delete streams, describe them, and find and abort open transactions.

The leader of the stream's group carries out changes and answers through ZooKeeper. Every request may be repeated after
an error: what was done already is refused as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from rollbridge.base.arguments import check_ints, checked
from rollbridge.base.deadlines import Backoff, Deadline, Duration, Timeout, answers_within, as_timedelta, wall_ms
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.client.outcomes import OutcomeClient
from rollbridge.consumer.reader import beginning, cut_before
from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    RollbridgeError,
    StreamExistsError,
    StreamNotFoundError,
    TransactionNotFoundError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import EARLIEST, LATEST, Isolation
from rollbridge.kafka.offsets import LogOffsets, list_offsets
from rollbridge.kafka.topics import view_topics
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.picture import StreamPicture
from rollbridge.metadata.records import Group, TransactionRecord
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind, WaitRow, WantedStream, refusal
from rollbridge.metadata.store import Metadata, look_at_streams
from rollbridge.stream.config import (
    FOREVER,
    LOG_RETENTION_MS_DEFAULT,
    HeaderForm,
    RecordTimes,
    Retention,
    StreamConfig,
    StreamState,
    header_form,
    record_times,
)
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.keyspace import Fit, KeyRange, Partitioner, check_partition, even_ranges, fit, ranges_of
from rollbridge.stream.names import DEFAULT_GROUP, GroupName, SegmentPlaces, StreamName, check_adoptable, group_named
from rollbridge.stream.positions import ReadPosition, StartLike, parse_start
from rollbridge.stream.scaling import FIXED, ScalingPolicy

RangeLike = KeyRange | tuple[float, float]


class Keep(Enum):
    """Type of :data:`KEEP`."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
"""Marker for a setting that stays as it is."""


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """Present description of a stream.

    Attributes:
        config: Settings of the stream.
        active: Newest epoch, with the segments that take plain writes.
        reference_epoch: Epoch against which transactions begin.
        epochs: Number of epochs so far.
        first_epoch: First of them that is kept.
        leader: Name of the coordinator that leads its group; None if none does.
        open_transactions: Its open transactions that outlived a moment, oldest first.
        fault: Why its transactions are not merged; None unless the stream is in an error state.
        partitions: Partition number of each active segment, by which consumers and producers name it.
    """

    config: StreamConfig
    active: EpochRecord
    reference_epoch: int
    epochs: int
    first_epoch: int
    leader: str | None
    open_transactions: tuple[TransactionRecord, ...]
    fault: StreamFault | None = None
    partitions: Mapping[SegmentId, int] = field(default_factory=dict)


P = ParamSpec("P")
T = TypeVar("T")


def _within_its_time(method: Callable[Concatenate[Admin, P], T]) -> Callable[Concatenate[Admin, P], T]:
    """Bound all ZooKeeper requests of a method by its ``timeout_s``."""

    @wraps(method)
    def bounded(self: Admin, /, *arguments: P.args, **options: P.kwargs) -> T:
        self._check_open()
        given = options.get("timeout_s")
        with answers_within(given if isinstance(given, int | float) else self._timeout_s):
            return method(self, *arguments, **options)

    return bounded


@checked()
class Admin:
    """Admin requests of a connection; ``b.admin``. Streams are named ``scope/stream``."""

    def __init__(
        self,
        metadata: Metadata,
        *,
        forget: Callable[[str], None],
        offsets: LogOffsets,
        sample: Callable[[str, float], Fit],
        client_name: str,
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        """Use ``forget`` to report the name of a stream changed here, ``offsets`` to connect to the brokers.

        ``sample`` tells where the keys of a topic are, within a time in seconds. ``check_open`` raises if the
        connection is closed; that is closed once it is dropped, so its method is held.
        """
        self._check_open = check_open
        self._zookeeper: Final = metadata
        self._offsets = offsets
        self._sample = sample
        self._forget = forget
        self._client_name = client_name
        self._timeout_s = timeout_s

    @property
    def _metadata(self) -> Metadata:
        self._check_open()
        return self._zookeeper

    @_within_its_time
    def create_stream(
        self,
        stream: str,
        *,
        segments: int | None = None,
        ranges: Iterable[RangeLike] | None = None,
        group: str | None = None,
        buffer_partitions: int | None = None,
        replication_factor: int | None = None,
        record_bytes_max: int | None = None,
        headers: HeaderForm | str | None = None,
        timestamps: RecordTimes | str | None = None,
        retention_time: Timeout = None,
        retention_bytes: int | None = None,
        retention_groups: Iterable[str] = (),
        scaling: ScalingPolicy | None = None,
        exist_ok: bool = False,
        timeout_s: float | None = None,
    ) -> StreamConfig:
        """Create a stream with its topics and epoch 0; return its settings.

        Args:
            stream: ``scope/stream``.
            segments: Number of segments of equal size; unless ``ranges`` are given, the fewest that ``scaling`` allows.
            ranges: Key ranges of the segments; they must cover [0, 1) without overlap or gap.
            group: Transaction group inside the scope, ``default`` if left out; a stream stays in its group.
            buffer_partitions: Partitions of the transaction buffer; 1 if left out.
            replication_factor: Of all its topics; the broker's default, which is -1, if left out.
            record_bytes_max: Largest record, key and headers included; 1,000,000 if left out, or 0.
            headers: Which records of its transactions carry the header that tells who wrote them: the ``first`` of each
                batch, which rollbridge's readers need, or ``each``, for readers that are not rollbridge's. The first if
                left out.
            timestamps: Whose times the records of its transactions have: those that their ``writer`` gave, or that of
                the ``commit``, which the latest record of each batch gets, and others as long before it as they were
                written. The writer's if left out.
            retention_time: Minimum time for which records are kept; for ever by default. See :meth:`update_stream`.
            retention_bytes: Minimum size of records that is kept, in bytes; all by default.
            retention_groups: Consumer groups: nothing is deleted that one of them has not read.
            scaling: How it is scaled by its load; by default it is not. See :meth:`update_stream`.
            exist_ok: Leave an existing stream as it is, and return its settings, if these are what the other arguments
                say. What is left out is not compared, and segments are with those that it began with: a stream that
                was scaled is the same stream.
            timeout_s: Seconds to wait for the answer; the connection's ``admin_timeout_s`` by default.

        Raises:
            InvalidNameError, InvalidRequestError: nothing was created.
            StreamExistsError: the stream exists, or is still being deleted; nothing was created.
            StreamExistsError: with ``exist_ok``: it has other settings, each of which is named; nothing was changed.
            CoordinatorUnavailableError: no coordinator answered; nothing was created.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        name = StreamName.parse(stream)
        owner = GroupName(name.scope, DEFAULT_GROUP if group is None else group)
        check_ints(
            buffer_partitions=buffer_partitions,
            replication_factor=replication_factor,
            record_bytes_max=record_bytes_max,
        )
        if segments is not None and ranges is not None:
            raise InvalidRequestError("give the number of segments or their ranges, not both; nothing was created")
        if scaling is not None:
            scaling.check()
        fewest = 1 if scaling is None else scaling.min_segments
        wanted = even_ranges(fewest if segments is None else segments) if ranges is None else ranges_of(ranges)
        check_partition(wanted)
        retention = Retention(_ms(retention_time), _bytes(retention_bytes), tuple(retention_groups))
        retention.check()
        said = WantedStream(
            group=group,
            ranges=None if segments is None and ranges is None else tuple(wanted),
            buffer_partitions=buffer_partitions,
            replication_factor=replication_factor,
            record_bytes_max=record_bytes_max or None,
            headers=None if headers is None else header_form(headers),
            timestamps=None if timestamps is None else record_times(timestamps),
            retention=retention,
            scaling=scaling,
        )
        # Looked up here first, so that a program that is run again needs no coordinator.
        if exist_ok and (found := self._in_use(name)) is not None:
            return self._same(found, said)
        is_new_group = self._metadata.ensure_group(owner)
        request = AdminRequest(
            kind=RequestKind.CREATE_STREAM,
            stream=str(name),
            ranges=tuple((item.low, item.high) for item in wanted),
            group=owner.group,
            buffer_partitions=1 if buffer_partitions is None else buffer_partitions,
            replication_factor=-1 if replication_factor is None else replication_factor,
            record_bytes_max=record_bytes_max or 0,
            retention=retention,
            headers=_header_form(headers),
            timestamps=str(record_times(timestamps or "") or ""),
            scaling=scaling,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        try:
            self._ask(owner, request, timeout_s, is_new_group=is_new_group)
        except StreamExistsError:
            # Another client has created it meanwhile; or it is being deleted, and then its settings cannot be returned.
            if not exist_ok or (found := self._in_use(name)) is None:
                raise
            return self._same(found, said)
        return _obeyed(self._config(name), scaling, timestamps)

    @_within_its_time
    def adopt_topic(
        self,
        topic: str,
        *,
        stream: str | None = None,
        partitioner: str | None = None,
        check: bool = True,
        group: str | None = None,
        buffer_partitions: int | None = None,
        replication_factor: int | None = None,
        headers: HeaderForm | str | None = None,
        timestamps: RecordTimes | str | None = None,
        exist_ok: bool = False,
        timeout_s: float | None = None,
    ) -> Adoption:
        """Make a stream of an existing topic and its records; nothing of the topic is changed.

        Its partitions are the segments of the stream. Native producers and consumers continue as before.

        Args:
            topic: The topic.
            stream: ``scope/stream``; by default ``topics/`` and the topic's name, with ``_`` for each ``.``. One
                transaction writes to several streams if they are of one scope, and one group of it.
            partitioner: Rule by which its producers choose the partition of a key: ``murmur2`` (Java), ``consistent``
                (librdkafka's default) or ``fnv1a`` (Sarama), also with ``_random`` behind it. By default the one that
                explains where the newest keys are, and ``murmur2`` if there are none.
            check: Refuse a partitioner that does not explain where the newest keys are.
            group: Transaction group inside the scope, ``default`` if left out; the stream never leaves it.
            buffer_partitions: Partitions of the transaction buffer; 1 if left out.
            replication_factor: Of the buffer; the broker's default, which is -1, if left out.
            headers: As for :meth:`create_stream`. In a compacted topic each record carries one in any case.
            timestamps: As for :meth:`create_stream`: with ``commit`` the topic's ``retention.ms`` counts from there.
            exist_ok: Leave a topic that this stream has adopted as it is, if that is with the same settings, as for
                :meth:`create_stream`.
            timeout_s: Seconds to wait for the answer; the connection's ``admin_timeout_s`` by default.

        Raises:
            InvalidNameError, InvalidRequestError, NotFoundError: nothing was written.
            ConflictError: another stream has adopted the topic, it is sealed, or no partitioner explains its keys.
            StreamExistsError: the stream exists, or is still being deleted; nothing was written.
            StreamExistsError: with ``exist_ok``: it has other settings, each of which is named; nothing was changed.
            CoordinatorUnavailableError: no coordinator answered; nothing was written.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        check_adoptable(topic)
        name = StreamName.of_topic(topic) if stream is None else StreamName.parse(stream)
        owner = GroupName(name.scope, DEFAULT_GROUP if group is None else group)
        wanted = None if partitioner is None else Partitioner.parse(partitioner)
        check_ints(buffer_partitions=buffer_partitions, replication_factor=replication_factor)
        said = WantedStream(
            group=group,
            buffer_partitions=buffer_partitions,
            replication_factor=replication_factor,
            headers=None if headers is None else header_form(headers),
            timestamps=None if timestamps is None else record_times(timestamps),
            partitioner=None if wanted is None else str(wanted),
        )
        if exist_ok and (known := self._in_use(name)) is not None and known.topic == topic:
            return Adoption(self._same(known, said), None)
        if wanted is None or check:
            found = self._sample(topic, self._timeout_s if timeout_s is None else timeout_s)
            wanted = choose(topic, found, wanted)
        else:
            found = None
        is_new_group = self._metadata.ensure_group(owner)
        request = AdminRequest(
            kind=RequestKind.ADOPT_TOPIC,
            stream=str(name),
            topic=topic,
            partitioner=str(wanted),
            group=owner.group,
            buffer_partitions=1 if buffer_partitions is None else buffer_partitions,
            replication_factor=-1 if replication_factor is None else replication_factor,
            headers=_header_form(headers),
            timestamps=str(record_times(timestamps or "") or ""),
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        try:
            self._adopt(owner, request, timeout_s, is_new_group)
        except StreamExistsError:
            known = self._in_use(name)  # another client may have adopted it meanwhile
            if not exist_ok or known is None or known.topic != topic:
                raise
            return Adoption(self._same(known, said), found)
        return Adoption(_obeyed(self._config(name), None, timestamps), found)

    def _adopt(self, owner: GroupName, request: AdminRequest, timeout_s: float | None, is_new_group: bool) -> None:
        """Ask for an adoption, again while the leader's broker may not have heard of the topic yet."""
        patience, backoff = None, Backoff()
        while True:
            try:
                self._ask(owner, request, timeout_s, is_new_group=is_new_group)
                return
            except NotFoundError as fault:
                # From the first answer on: a group that is new has no leader yet.
                patience = patience or Deadline(NEWS_S)
                if type(fault) is not NotFoundError or patience.passed():
                    raise
            backoff.sleep(patience)

    @_within_its_time
    def release_topic(self, topic: str, *, missing_ok: bool = False, timeout_s: float | None = None) -> bool:
        """Make an adopted topic a plain one again, with all its records; return False if there was nothing to do.

        The stream is gone then.

        Args:
            topic: The topic, or the stream that has adopted it.
            missing_ok: Do nothing if no stream has adopted it.
            timeout_s: Seconds to wait for the answer.

        Raises:
            StreamNotFoundError: no stream has adopted it.
            ConflictError: the stream has open transactions; commit or abort them first.
            InvalidRequestError: the stream has been scaled, and has topics of its own; nothing was done.
            CoordinatorUnavailableError: no coordinator answered; nothing was done.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        try:
            name = self.name_of(topic)
            config = self._metadata.stream(name)
            if config is None:
                raise self._missing(name)
        except StreamNotFoundError:
            if missing_ok:
                return False
            raise
        if not config.topic:
            raise InvalidRequestError(f"stream {name} has not adopted a topic; nothing was done")
        request = AdminRequest(
            kind=RequestKind.RELEASE_TOPIC,
            stream=str(name),
            topic=config.topic,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        self._ask(config.group, request, timeout_s)
        return True

    def name_of(self, name: str) -> StreamName:
        """Return the stream that a name means: ``scope/stream``, or a topic that a stream has adopted.

        Raises:
            StreamNotFoundError: no stream has adopted a topic of this name.
            InvalidNameError: not a name.
        """
        return self._metadata.name_of(name)

    @_within_its_time
    def scale(
        self,
        stream: str,
        *,
        seal: Iterable[int],
        ranges: Iterable[RangeLike],
        abort_foreign: bool = False,
        leave_topic: bool = False,
        timeout_s: float | None = None,
    ) -> EpochRecord:
        """Replace active segments by new ones and return the new epoch; open transactions continue undisturbed.

        The scale waits for native transactions of other Kafka clients, as no segment can be sealed while one is open on
        it: for at most 20 s. Everything else continues meanwhile.

        Args:
            stream: ``scope/stream``.
            seal: Numbers of the active segments to seal.
            ranges: Key ranges of the new segments; together they must cover exactly what the sealed ones did.
            abort_foreign: Abort such native transactions instead of waiting for them. The coordinator needs Write on
                their transactional ids, and for hanging ones, which no transaction coordinator knows, ClusterAction on
                the cluster.
            leave_topic: Needed for a stream whose segments are the partitions of an adopted topic. The whole topic is
                sealed: no writes are possible any more. The stream continues in topics of its own, which native clients
                do not know. Partitions that are not in ``seal`` become one segment each.
            timeout_s: Seconds to wait for the answer.

        Raises:
            StreamNotFoundError, InvalidRequestError: nothing was changed.
            InvalidRequestError: the scale would leave an adopted topic, and ``leave_topic`` does not say so.
            ConflictError: native transactions of others, which are named, stayed open; nothing was changed.
            CoordinatorUnavailableError: no coordinator answered; nothing was changed.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        name = self.name_of(stream)
        sealed = tuple(seal)
        check_ints(seal=sealed)
        answer = self._ask(
            self._config(name).group,
            AdminRequest(
                kind=RequestKind.SCALE_STREAM,
                stream=str(name),
                seal=sealed,
                ranges=tuple((item.low, item.high) for item in ranges_of(ranges)),
                abort_foreign=abort_foreign,
                leave_topic=leave_topic,
                client_name=self._client_name,
                created_ms=wall_ms(),
            ),
            timeout_s,
        )
        return self.history(stream).record(answer.epoch)

    @_within_its_time
    def update_stream(
        self,
        stream: str,
        *,
        retention_time: Duration | Keep | None = KEEP,
        retention_bytes: int | Keep | None = KEEP,
        retention_groups: Iterable[str] | Keep = KEEP,
        headers: HeaderForm | str | Keep = KEEP,
        timestamps: RecordTimes | str | Keep = KEEP,
        scaling: ScalingPolicy | Keep | None = KEEP,
        timeout_s: float | None = None,
    ) -> StreamConfig:
        """Change retention, headers, times or scaling of a stream; settings not given stay as they are.

        With both limits, what is beyond one of them is deleted. Age counts from when a record was written, not from the
        timestamp that it carries, and begins with the first retention check after the limit was set. A stream that is
        on the topic that it has adopted takes no limits, as these are the topic's; it takes groups.

        Args:
            stream: ``scope/stream``, or an adopted topic.
            retention_time: Minimum time for which records are kept; None: for ever.
            retention_bytes: Minimum size of records that is kept, in bytes as stored in Kafka; None: all.
            retention_groups: Consumer groups: nothing is deleted, by retention or by :meth:`truncate`, that one of them
                has not read. A group that has committed nothing keeps everything.
            headers: As for :meth:`create_stream`; of transactions that begin later.
            timestamps: As for :meth:`create_stream`; of transactions that are committed later.
            scaling: The rate that each segment is meant to take. Its leader splits segments that take more for some
                minutes, at the median of their recent keys, and merges neighbours that take little. None: it is scaled
                by request only. A stream that is on the topic that it has adopted takes none: a scale would leave it.
            timeout_s: Seconds to wait for the answer.

        Raises:
            InvalidRequestError, StreamNotFoundError: nothing was changed.
            CoordinatorUnavailableError: no coordinator answered; nothing was changed.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        name = self.name_of(stream)
        config = self._config(name)
        retention = _changed(config.retention, retention_time, retention_bytes, retention_groups)
        policy = None if isinstance(scaling, Keep) else scaling or FIXED
        if policy is not None:
            policy.check()
        request = AdminRequest(
            kind=RequestKind.UPDATE_STREAM,
            stream=str(name),
            retention=retention,
            headers="" if isinstance(headers, Keep) else _header_form(headers),
            timestamps="" if isinstance(timestamps, Keep) else str(record_times(timestamps) or ""),
            scaling=policy,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        self._ask(config.group, request, timeout_s)
        return _obeyed(self._config(name), policy, None if isinstance(timestamps, Keep) else timestamps)

    @_within_its_time
    def update_group(
        self,
        group: str,
        *,
        retention_time: Duration | Keep | None = KEEP,
        retention_bytes: int | Keep | None = KEEP,
        retention_groups: Iterable[str] | Keep = KEEP,
        default: bool = False,
        timeout_s: float | None = None,
    ) -> Group:
        """Change the retention of a transaction group's commit log; settings not given stay as they are.

        Without any, it is kept as long as the coordinators say, which is a week by default. With both limits, what is
        beyond one of them is deleted, up to what a new leader needs. Age counts from when a record was written.

        Args:
            group: ``scope/group``, or the scope of its default group.
            retention_time: Minimum time for which it is kept; None: for ever.
            retention_bytes: Minimum size that is kept, in bytes as stored in Kafka; None: all.
            retention_groups: Consumer groups with commits on the log: nothing is deleted that one of them has not read.
                A group that has committed nothing there keeps everything.
            default: Keep it as long as the coordinators say, whatever was set before; with nothing else.
            timeout_s: Seconds to wait for the answer.

        Raises:
            InvalidRequestError, NotFoundError: nothing was changed.
            CoordinatorUnavailableError: no coordinator answered; nothing was changed.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        name = group_named(group)
        before = self._group(name)
        if default:
            given = (retention_time, retention_bytes, retention_groups)
            if not all(isinstance(item, Keep) for item in given):
                raise InvalidRequestError("give either limits or the default, not both; nothing was changed")
            retention = None
        else:
            known = before.retention or Retention(LOG_RETENTION_MS_DEFAULT)
            retention = _changed(known, retention_time, retention_bytes, retention_groups)
        request = AdminRequest(
            kind=RequestKind.UPDATE_GROUP,
            group=name.group,
            retention=retention,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        self._ask(name, request, timeout_s)
        return self._group(name)

    @_within_its_time
    def groups(self, *, timeout_s: float | None = None) -> list[Group]:
        """Return the records of all transaction groups, by name.

        Those that cannot be read are left out; :meth:`unreadable_groups` names them.

        Raises:
            NotFoundError: there are none, and no coordinator has ever served the ZooKeeper path.
        """
        found = self._metadata.group_records()
        if not found:
            self._metadata.require_layout()
        return [item for _, item in sorted(found.items(), key=lambda pair: str(pair[0])) if isinstance(item, Group)]

    def unreadable_groups(self) -> dict[GroupName, str]:
        """Return the groups whose records cannot be read, which :meth:`groups` leaves out, with the reasons."""
        found = self._metadata.group_records()
        return {name: str(item) for name, item in found.items() if isinstance(item, RollbridgeError)}

    def _all_groups(self) -> list[GroupName]:
        found = self._metadata.groups()
        if not found:
            self._metadata.require_layout()
        return found

    @_within_its_time
    def group(self, group: str, *, timeout_s: float | None = None) -> Group:
        """Return the record of a transaction group, ``scope/group``, or of the default group of a scope.

        Raises:
            NotFoundError: there is no such group.
        """
        return self._group(group_named(group))

    @_within_its_time
    def truncate(self, stream: str, before: StartLike, *, timeout_s: float | None = None) -> ReadPosition:
        """Truncate a stream before a position or time; return where it begins now.

        The records of every key are deleted from the oldest on. Segments of which nothing is left are removed from
        Kafka. Repeating the request, or naming what has been deleted already, changes nothing.

        Args:
            stream: ``scope/stream``.
            before: Any start position of a reader: a saved position, a DLSN or SN, a time (``datetime`` or ms since
                1970, by the timestamps of the records), or ``"latest"``, for all that can be read now.
            timeout_s: Seconds to wait for the answer.

        Raises:
            InvalidRequestError: not a position, one of another stream, or one beyond the end.
            ConflictError: a group that the stream waits for has not read what would be deleted.
            StreamNotFoundError: there is no such stream.
            UnavailableError: not all could be deleted; ask again. Or it was, and where the stream begins is not known.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        name = self.name_of(stream)
        config = self._config(name)
        wanted = parse_start(name, before)
        cut = cut_before(self._offsets, config.places, self.history(stream), wanted)
        request = AdminRequest(
            kind=RequestKind.TRUNCATE_STREAM,
            stream=str(name),
            cut=cut,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        self._ask(config.group, request, timeout_s)
        try:
            return self.beginning(stream)
        except RollbridgeError as fault:
            raise UnavailableError(f"stream {name} was truncated; its beginning cannot be read now: {fault}") from fault

    def beginning(self, stream: str) -> ReadPosition:
        """Return the beginning of a stream: the offset of the first record left in each of its first segments."""
        return beginning(self._offsets, self._config(self.name_of(stream)).places, self.history(stream))

    @_within_its_time
    def delete_stream(self, stream: str, *, missing_ok: bool = False, timeout_s: float | None = None) -> bool:
        """Delete a stream with all its topics and records, or await a deletion begun before; return False if none.

        Args:
            stream: ``scope/stream``.
            missing_ok: Do nothing if the stream does not exist.
            timeout_s: Seconds to wait for the answer.

        Raises:
            StreamNotFoundError: the stream does not exist.
            ConflictError: the stream has open transactions.
            CoordinatorUnavailableError: no coordinator answered; nothing was deleted.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        try:
            name = self.name_of(stream)
            request = AdminRequest(
                kind=RequestKind.DELETE_STREAM, stream=str(name), client_name=self._client_name, created_ms=wall_ms()
            )
            groups = self._groups_of(name)
            if not groups:
                raise self._missing(name)
            for place, group in enumerate(groups, 1):
                try:
                    self._ask(group, request, timeout_s)
                    break
                except StreamNotFoundError:  # it is another group's, or another client has deleted it meanwhile
                    if place == len(groups):
                        raise
        except StreamNotFoundError:
            if not missing_ok:
                raise
            return False
        return True

    def _groups_of(self, name: StreamName) -> list[GroupName]:
        """Return the group of a stream, or those that it may be in, if its settings cannot be read."""
        try:
            config = self._metadata.stream(name)
        except CorruptDataError:
            return [group for group in self._all_groups() if group.scope == name.scope]
        return [] if config is None else [config.group]

    def describe(self, stream: str) -> StreamDescription:
        """Describe a stream as it is now.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        name = self.name_of(stream)
        config = self._config(name)
        history = self.history(stream)
        return StreamDescription(
            config=config,
            active=history.active,
            reference_epoch=history.active.reference_epoch,
            epochs=history.next_epoch,
            first_epoch=history.first,
            leader=self._metadata.leader(config.group),
            open_transactions=tuple(
                record for record in self._metadata.transactions(config.group) if str(name) in record.streams
            ),
            fault=self._metadata.stream_fault(name),
            partitions={item.id: history.graph.partitions[item.id] for item in history.active.segments},
        )

    @_within_its_time
    def waits(self, stream: str, *, timeout_s: float | None = None) -> tuple[WaitRow, ...]:
        """Return what concerns a stream of all that waits in its group, the longest wait first.

        Raises:
            StreamNotFoundError: there is no such stream.
            CoordinatorUnavailableError: no coordinator answered.
            InvalidRequestError: a leader of an older version, which does not tell.
        """
        config = self._config(self.name_of(stream))
        request = AdminRequest(
            kind=RequestKind.DESCRIBE,
            stream=str(config.name),
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        answer = self._ask(config.group, request, timeout_s)
        return answer.waits or ()

    def places(self, stream: str) -> SegmentPlaces:
        """Return where the segments of a stream lie in Kafka.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        return self._config(self.name_of(stream)).places

    def list_streams(self, scope: str | None = None) -> list[StreamConfig]:
        """Return the settings of all streams, or of those of a scope.

        Raises:
            NotFoundError: there are none, and no coordinator has ever served the ZooKeeper path.
        """
        found = self._metadata.streams(scope)
        if not found:
            self._metadata.require_layout()
        return found

    def look_at_streams(self, scope: str | None = None) -> tuple[list[StreamPicture], dict[str, str]]:
        """Return the streams as status and doctor see them, and why the settings of others cannot be read."""
        found = look_at_streams(self._metadata, scope)
        if not any(found):
            self._metadata.require_layout()
        return found

    def history(self, stream: str, changed: Callable[[], None] | None = None) -> EpochHistory:
        """Return the epochs of a stream; call ``changed`` once when there may be more of them.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        name = self.name_of(stream)
        history = self._metadata.history(name, changed)
        if history is None:
            raise self._missing(name)
        return history

    def transactions(self, group: str | GroupName | None = None) -> list[TransactionRecord]:
        """Return the open transactions of one group or of all, oldest first.

        Transactions are listed once they have been open for a moment, about half a second.

        Raises:
            NotFoundError: no coordinator has ever served the ZooKeeper path.
        """
        wanted = GroupName.of_any(group)
        groups = self._all_groups() if wanted is None else [wanted]
        found = [record for item in groups for record in self._metadata.transactions(item)]
        return sorted(found, key=lambda record: (record.begun_ms, record.id))

    def find_transaction(self, transaction: TransactionId | str) -> TransactionRecord:
        """Return the record of one open transaction.

        Raises:
            TransactionNotFoundError: not recorded as open.
        """
        identifier = TransactionId.of_any(transaction)
        record = self._metadata.find_transaction(identifier)
        if record is None:
            raise TransactionNotFoundError(
                f"no open transaction {identifier} is recorded: it has ended, it never began, or it began less than a "
                f"second ago and is not recorded yet; Bridge.outcome or `rollbridge txn outcome {identifier}` tells"
            )
        return record

    @_within_its_time
    def abort_transaction(
        self,
        transaction: TransactionId | str,
        *,
        reason: str = "admin",
        group: str | GroupName | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Abort an open transaction of any client, and return the reason once the abort is logged.

        One that is aborted already stays so, with the reason that it has. Without its ``group`` the transaction is
        found by its record, or else the leaders of all groups are asked.

        Raises:
            TransactionCommittedError: it is committed; ``code`` is ``already-committed``.
            TransactionNotFoundError: not open, and it is certain that it has never ended.
            OutcomeExpiredError: not open, and may have ended so long ago that it has been forgotten.
            TransactionPreserverClosedError: not open, and outcomes are not remembered here.
            CoordinatorUnavailableError: no coordinator answered; nothing was done.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        identifier, owner = TransactionId.of_any(transaction), GroupName.of_any(group)
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        if owner is None and (record := self._metadata.find_transaction(identifier)) is not None:
            owner = record.group
        if owner is None:
            owner, _ = OutcomeClient(self._metadata, self._client_name).transaction(identifier, deadline.left())
        request = AdminRequest(
            kind=RequestKind.ABORT_TRANSACTION,
            transaction=str(identifier),
            reason=reason,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )
        answer = self._ask(owner, request, deadline.left())
        return answer.transactions[0].reason if answer.transactions else reason

    @_within_its_time
    def clear_snapshots(self, stream: str, *, timeout_s: float | None = None) -> None:
        """Delete the snapshots of a stream's buffer. The leader reads the buffer again, and takes new ones in time.

        Raises:
            StreamNotFoundError: the stream does not exist.
            CoordinatorUnavailableError: no coordinator answered; nothing was deleted.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        self._ask_about_snapshots(RequestKind.CLEAR_SNAPSHOTS, stream, timeout_s)

    @_within_its_time
    def rebuild_snapshots(self, stream: str, *, timeout_s: float | None = None) -> None:
        """Have the leader rebuild the snapshots of a stream from its buffer and the commit log, and wait for that.

        Raises:
            StreamNotFoundError: the stream does not exist.
            CoordinatorUnavailableError: no coordinator answered; nothing was changed.
            UnknownWriteError: taken, but not answered in time; it may still be carried out.
        """
        self._ask_about_snapshots(RequestKind.REBUILD_SNAPSHOTS, stream, timeout_s)

    def _ask_about_snapshots(self, kind: RequestKind, stream: str, timeout_s: float | None) -> None:
        name = self.name_of(stream)
        request = AdminRequest(kind=kind, stream=str(name), client_name=self._client_name, created_ms=wall_ms())
        self._ask(self._config(name).group, request, timeout_s)

    def _ask(
        self, group: GroupName, request: AdminRequest, timeout_s: float | None, *, is_new_group: bool = False
    ) -> AdminAnswer:
        try:
            answer = self._metadata.ask(group, request, self._timeout_s if timeout_s is None else timeout_s)
        finally:
            if request.stream:
                self._forget(request.stream)
        if not answer.ok:
            if is_new_group:  # only a leader can answer, so the group was made before
                written = f"group {group}, which was created for this, stays without streams"
                answer = replace(answer, message=f"{answer.message}; {written}")
            raise refusal(answer, request.transaction)
        return answer

    def _group(self, name: GroupName) -> Group:
        found = self._metadata.group(name)
        if found is None:
            raise NotFoundError(f"there is no transaction group {name}: no stream was ever created in it")
        return found

    def _config(self, name: StreamName) -> StreamConfig:
        config = self._in_use(name)
        if config is None:
            raise self._missing(name)
        return config

    def _in_use(self, name: StreamName) -> StreamConfig | None:
        config = self._metadata.stream(name)
        return None if config is None or config.state is StreamState.DELETING else config

    def _same(self, known: StreamConfig, said: WantedStream) -> StreamConfig:
        """Return the settings of a stream that exists; raise StreamExistsError if others were asked for."""
        first: tuple[KeyRange, ...] | None = None
        if said.ranges is not None and (history := self._metadata.history(known.name)) is not None:
            oldest = history.records[0]
            first = tuple(item.range for item in oldest.segments) if oldest.epoch == known.first_epoch else None
        found = said.differences(known, first)
        if not found:
            return known
        raise StreamExistsError(
            f"stream {known.name} exists with other settings than were asked for ({'; '.join(found)}); nothing was "
            "changed: ask for what it has, change it with `rollbridge stream update`, or take another name",
            differences=found,
            code="stream-differs",
        )

    def _missing(self, name: StreamName) -> RollbridgeError:
        if name.scope not in (scopes := self._metadata.scopes()):
            if not scopes:
                self._metadata.require_layout()
            return missing_scope(name.scope)
        return StreamNotFoundError(f"stream {name} does not exist")


def missing_scope(scope: str) -> StreamNotFoundError:
    """Return the error of a scope in which there is nothing."""
    return StreamNotFoundError(f"there is no scope {scope}: no stream was ever created in it", code="scope-not-found")


def _header_form(headers: HeaderForm | str | None) -> str:
    return str(header_form(headers or "") or HeaderForm.FIRST)


def _changed(
    known: Retention,
    time_kept: Duration | Keep | None,
    bytes_kept: int | Keep | None,
    groups: Iterable[str] | Keep,
) -> Retention:
    """Return a retention with what is given; InvalidRequestError if that makes no sense."""
    changed = Retention(
        known.ms if isinstance(time_kept, Keep) else _ms(time_kept),
        known.bytes if isinstance(bytes_kept, Keep) else _bytes(bytes_kept),
        known.groups if isinstance(groups, Keep) else tuple(groups),
    )
    changed.check()
    return changed


def _obeyed(config: StreamConfig, policy: ScalingPolicy | None, timestamps: RecordTimes | str | None) -> StreamConfig:
    """Return a stream's settings; InvalidRequestError if a leader that does not know one has passed it over."""
    lacks = []
    if policy is not None and not policy.is_fixed and config.scaling is None:
        lacks.append("does not scale by load")
    if timestamps is not None and RecordTimes(timestamps) is not config.timestamps:
        lacks.append(f"does not know --timestamps {RecordTimes(timestamps).value}")
    if lacks:
        raise InvalidRequestError(
            f"the coordinator of group {config.group} is of an earlier release and {' and '.join(lacks)}: stream "
            f"{config.name} is without that, and all else was done; upgrade the coordinators and ask again"
        )
    return config


def _ms(time_kept: Timeout) -> int:
    return FOREVER if time_kept is None else as_timedelta(time_kept) // timedelta(milliseconds=1)


def _bytes(kept: int | None) -> int:
    return FOREVER if kept is None else kept


SAMPLED_PARTITIONS: Final = 16
"""Most partitions that are sampled, spread over the topic: each takes a request."""
SAMPLED_RECORDS: Final = 500
"""Newest offsets of each partition that are sampled."""
SAMPLED_BYTES: Final = 256 * 1024
NEWS_S: Final = 5.0
"""Time in which all brokers learn of a topic that has just been created."""
DEFAULT: Final = Partitioner.MURMUR2
"""Of a topic that has no keys yet: the rule of Java's producers, and so of Connect, Streams and ksqlDB."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A topic that has been adopted, its stream's settings, and the result of a sample of its keys, if one was read."""

    config: StreamConfig
    fit: Fit | None


def sample_topic(kafka: KafkaClient, topic: str, timeout_s: float) -> Fit:
    """Read the newest committed records of a topic, and compare where their keys are with each partitioner.

    Raises:
        NotFoundError: There is no such topic.
        NotAuthorizedError, KafkaUnavailableError.
    """
    deadline = Deadline(timeout_s)
    with kafka.borrow(deadline) as cluster:
        patience, backoff = Deadline(min(timeout_s, NEWS_S)), Backoff()
        while (known := view_topics(cluster, [topic], deadline.left()).get(topic)) is None:
            if patience.passed():
                raise NotFoundError(f"topic {topic} does not exist; nothing was written")
            backoff.sleep(patience)
        step = max(known.partitions // SAMPLED_PARTITIONS, 1)
        places = [(topic, number) for number in range(0, known.partitions, step)]
        starts = list_offsets(cluster, places, EARLIEST, Isolation.READ_UNCOMMITTED, "read the first offset", deadline)
        ends = list_offsets(cluster, places, LATEST, Isolation.READ_COMMITTED, "read the end", deadline)
        reader = kafka.log(retry_timeout_s=deadline.left())

        def keys() -> Iterator[tuple[bytes, int]]:
            for place in places:
                start, (_, number) = max(starts[place], ends[place] - SAMPLED_RECORDS), place
                if start < ends[place]:
                    found = reader.fetch(topic, start, partition=number, max_bytes=SAMPLED_BYTES)
                    yield from ((record.key, number) for record in found.records if record.key)

        return fit(keys(), known.partitions)


def choose(topic: str, found: Fit, wanted: Partitioner | None) -> Partitioner:
    """Return the partitioner to adopt a topic with.

    Raises:
        ConflictError: the sample does not agree with the wanted one, or with none or several of them.
    """
    if wanted is not None:
        if found.matches[wanted] < found.keys:
            raise ConflictError(
                f"{wanted} does not put the keys of topic {topic} where they are: {found}; nothing was written; with "
                "partitions added since, or producers of several kinds, no rule does: choose that of the producers "
                "that you have now, and give --unchecked (check=False)"
            )
        return wanted
    if not found.keys:
        return DEFAULT
    if found.best is None:
        raise ConflictError(
            f"the partitioner of topic {topic}'s producers is not clear: {found}; nothing was written; name it with "
            "--partitioner (partitioner=...), and --unchecked (check=False) if none explains all keys"
        )
    return found.best

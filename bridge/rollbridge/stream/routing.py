"""Routes: from a key to the segment of a stream's reference epoch, as fast as Python allows.

Positions are floats in [0, 1) that come from the upper 53 bits of a 64-bit hash, so comparing a hash with a range's
lower end, scaled to 64 bits, decides the same and needs no float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh64_intdigest

from rollbridge.base.errors import InvalidRequestError, StreamRecreatedError, TruncatedError
from rollbridge.stream.config import FOREVER, HeaderForm, StreamConfig, TopicLimits
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeySpace, KnownKeys, even_ranges
from rollbridge.stream.names import GroupName, Partition, SegmentPlaces


def place_of_partition(
    places: SegmentPlaces, partition: int, known: EpochHistory, reread: Callable[[], EpochHistory]
) -> Partition:
    """Return where the segment lies that a partition number of a stream names.

    Args:
        places: The stream, and where its segments lie.
        partition: The number.
        known: The stream's epochs as they were last seen.
        reread: Reads them again; called for a number that they do not have yet.

    Raises:
        InvalidRequestError: no segment has had it so far.
        TruncatedError: the segment was removed, and its epochs have been dropped since.
        StreamRecreatedError: it was one of a stream that was deleted before this one was created.
    """
    history = known if partition <= max(known.graph.by_partition) else reread()
    segments = history.graph.by_partition
    found = segments.get(partition)
    if found is not None:
        return places.of(found)
    last, stream = max(segments), places.stream
    if not 0 <= partition <= last:
        raise InvalidRequestError(f"{stream} has had no partition {partition} so far; the last one is {last}")
    if history.first == history.born:
        raise StreamRecreatedError(
            f"partition {partition} is of a stream {stream} that was deleted; the one that was created under its name "
            f"since begins with partition {min(segments)}"
        )
    raise TruncatedError(f"partition {partition} of {stream} was removed: all its records have been truncated")


_POSITION_BITS = 53
_UNUSED_BITS = 64 - _POSITION_BITS


def hash_bounds(lower_ends: Sequence[float]) -> tuple[int, ...]:
    """Return, for each lower end of a range but the first, the smallest hash whose position is not below it."""
    return tuple(math.ceil(math.ldexp(low, _POSITION_BITS)) << _UNUSED_BITS for low in lower_ends[1:])


def locator(keys: KeySpace, lower_ends: Sequence[float]) -> tuple[tuple[int, ...], Callable[[bytes, int], int]]:
    """Return bounds and a function; the place of a key among ranges is ``bisect_right(bounds, function(key, seed))``.

    Args:
        keys: Where keys lie.
        lower_ends: Of the ranges, which are in order and leave no gap.
    """
    if _are_partitions(keys, lower_ends):
        return tuple(range(1, keys.partitions)), keys.partition_of
    return hash_bounds(lower_ends), keys.hash_of


def _are_partitions(keys: KeySpace, lower_ends: Sequence[float]) -> bool:
    return bool(keys.partitions) and tuple(lower_ends) == tuple(item.low for item in even_ranges(keys.partitions))


@dataclass(frozen=True, slots=True)
class Route:
    """How the records of one stream find their segment in one epoch.

    ``numbers`` are the segment numbers in order of their ranges; the segment of a key is
    ``numbers[bisect_right(bounds, hash_of(key, HASH_SEED))]``.
    """

    stream: str
    epoch: int
    group: GroupName
    numbers: tuple[int, ...]
    bounds: tuple[int, ...]
    buffer_topic: str
    buffer_partitions: int
    record_bytes_max: int
    keys: KeySpace
    hash_of: Callable[[bytes, int], int] = field(default=xxh64_intdigest, compare=False)
    known: KnownKeys | None = field(default=None, compare=False)
    """Places of keys, for who writes many, if the segments are the partitions of an adopted topic."""
    topic: str = ""
    """The topic that the stream has adopted, which is another name of the stream."""
    limits: TopicLimits | None = None
    """Limits of the segments beyond the stream's own, if they are partitions of an adopted topic."""
    headers: HeaderForm = HeaderForm.FIRST
    """Which records carry rollbridge's header."""
    buffer_id: str = ""
    """Kafka's id of the buffer; another one under its name has not what was written to this one."""
    kept_ms: int = FOREVER
    """Time for which Kafka keeps records, from when they are written; see :meth:`.StreamConfig.kept_in`."""

    @classmethod
    def of(cls, config: StreamConfig, record: EpochRecord) -> Route:
        """Return the route through an epoch of a stream."""
        lows = [segment.range.low for segment in record.segments]
        bounds, hash_of = locator(config.keys, lows)
        return cls(
            stream=str(config.name),
            epoch=record.epoch,
            group=config.group,
            numbers=tuple(segment.id.number for segment in record.segments),
            bounds=bounds,
            buffer_topic=config.buffer_topic,
            buffer_partitions=config.buffer_partitions,
            record_bytes_max=config.record_bytes_max,
            keys=config.keys,
            hash_of=hash_of,
            known=config.keys.known_keys() if _are_partitions(config.keys, lows) else None,
            topic=config.topic,
            limits=config.limits_in(record),
            headers=config.headers,
            buffer_id=config.buffer_topic_id,
            kept_ms=config.kept_in(record),
        )


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream as it was last read: transactions that begin now take ``route``."""

    config: StreamConfig
    history: EpochHistory
    route: Route

    @classmethod
    def of(cls, config: StreamConfig, history: EpochHistory) -> StreamView:
        """Return the view of a stream; the route goes through the reference epoch of the active one."""
        config = config.as_of(history)
        return cls(config, history, Route.of(config, history.reference))

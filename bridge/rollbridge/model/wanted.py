"""What is asked of a stream that may exist already, and in what one that exists differs from it.

Only what is said counts: a program that is run again must not fail because somebody has scaled, moved or reconfigured
the stream meanwhile, unless it asks for the very thing that was changed. Segments are compared with those that the
stream began with, for as long as that epoch is kept; scales are part of the life of a stream.

Source: ``CREATE TABLE IF NOT EXISTS`` says nothing of what it finds; Kubernetes' server-side apply compares what is
stated, and leaves alone what is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollbridge.model.keyspace import KeyRange
from rollbridge.model.records import FOREVER, HeaderForm, RecordTimes, Retention, StreamConfig
from rollbridge.model.scaling import FIXED, ScalingPolicy

_NOTHING = Retention()
_RANGES_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedStream:
    """Settings that are asked for; None, or what :class:`.Retention` has by default, where nothing is said.

    Attributes:
        ranges: Key ranges of the segments that it begins with, in order.
        retention: Its limits; those that are not set are not compared.
    """

    group: str | None = None
    ranges: tuple[KeyRange, ...] | None = None
    buffer_partitions: int | None = None
    replication_factor: int | None = None
    record_bytes_max: int | None = None
    headers: HeaderForm | None = None
    retention: Retention = _NOTHING
    partitioner: str | None = None
    scaling: ScalingPolicy | None = None
    timestamps: RecordTimes | None = None

    def differences(self, known: StreamConfig, first: tuple[KeyRange, ...] | None) -> list[str]:
        """Return in what a stream is another one than was asked for, each as ``name: it is X, and Y was asked for``.

        Args:
            known: Its settings.
            first: Key ranges of the segments that it began with; None if these are forgotten.
        """
        pairs: list[tuple[str, object, object]] = [
            ("group", known.group.group, self.group),
            ("buffer partitions", known.buffer_partitions, self.buffer_partitions),
            ("replication factor", _replicas(known.replication_factor), _replicas(self.replication_factor)),
            ("largest record", known.record_bytes_max, self.record_bytes_max),
            ("headers", known.headers.value, None if self.headers is None else self.headers.value),
            ("partitioner", known.partitioner, self.partitioner),
            ("timestamps", known.timestamps.value, None if self.timestamps is None else self.timestamps.value),
            ("scaling", str(known.scaling or FIXED), None if self.scaling is None else str(self.scaling)),
        ]
        found = [
            f"{what}: it is {is_}, and {asked} was asked for" for what, is_, asked in pairs if asked not in (None, is_)
        ]
        if self.ranges is not None and first is not None and self.ranges != first:
            found.append(f"segments: it began with {_shown(first)}, and {_shown(self.ranges)} were asked for")
        return [*found, *self._kept_otherwise(known.retention)]

    def _kept_otherwise(self, known: Retention) -> Iterator[str]:
        if self.retention.ms not in (FOREVER, known.ms):
            yield f"retention time: it is {_limit(known.ms, 'ms')}, and {self.retention.ms} ms was asked for"
        if self.retention.bytes not in (FOREVER, known.bytes):
            asked = f"{self.retention.bytes} bytes"
            yield f"retention size: it is {_limit(known.bytes, 'bytes')}, and {asked} was asked for"
        if self.retention.groups and set(self.retention.groups) != set(known.groups):
            yield (
                f"retention groups: they are {', '.join(known.groups) or 'none'}, and "
                f"{', '.join(self.retention.groups)} was asked for"
            )


def _replicas(factor: int | None) -> object:
    return "the broker's default" if factor == -1 else factor


def _limit(value: int, unit: str) -> str:
    return "unlimited" if value == FOREVER else f"{value} {unit}"


def _shown(ranges: tuple[KeyRange, ...]) -> str:
    """Return a number of segments with their ranges, as far as these are few."""
    listed = ", ".join(f"[{item.low:g}, {item.high:g})" for item in ranges[:_RANGES_SHOWN_MAX])
    more = ", ..." if len(ranges) > _RANGES_SHOWN_MAX else ""
    return f"{len(ranges)} ({listed}{more})"

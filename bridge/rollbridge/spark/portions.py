"""What the driver tells a task of the source to read. Made without what only tasks need: drivers start often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from rollbridge.model.identifiers import SegmentId
from rollbridge.model.records import StreamConfig

if TYPE_CHECKING:
    from rollbridge.spark.runs import Runs


@dataclass(frozen=True, slots=True)
class Place:
    """What all records of a segment have in common."""

    stream: str
    topic: str
    segment: SegmentId
    sequence_base: int | None
    runs: Runs | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets ``start..end-1`` of a segment."""

    place: Place
    start: int
    end: int


class Portion(InputPartition):  # type: ignore[misc]  # types are checked without PySpark
    """What one task reads, one piece after the other."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.pieces = list(pieces)


class PreviewPortion(InputPartition):  # type: ignore[misc]  # types are checked without PySpark
    """The records of transactions that are open when the task runs."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(None)
        self.config = config

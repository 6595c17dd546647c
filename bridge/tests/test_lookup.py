"""What conditions are told of segments that are gone: nobody knows what stood there, so not that nothing did."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from rollbridge.base.deadlines import Deadline
from rollbridge.base.sn import ANY, EMPTY, SN
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.segment_tail import LineageTails, ask
from rollbridge.stream.epochs import EpochHistory, without_epochs
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.names import SegmentPlaces, StreamName
from rollbridge.stream.reading import KeyLineage

STREAM = StreamName.parse("scope/stream")
KEY = b"k"


@pytest.fixture
def reader() -> LogReader:
    """Reads nothing: whatever is asked here is known from the history."""
    return KafkaClient("127.0.0.1:1").log(retry_timeout_s=0)


def scaled(end: int) -> EpochHistory:
    """A segment that ended there, and its successor."""
    history = EpochHistory.create(even_ranges(1), 0)
    record = history.plan_scale([0], [KeyRange(0.0, 1.0)], 0)
    longer = history.with_records(record)
    return longer.with_sealed_ends(record.epoch, {item.id: end for item in longer.ended_with(record.epoch)})


def removed(end: int) -> EpochHistory:
    """The same after the first one was removed."""
    history = scaled(end)
    return history.with_removed(item.id for item in history.ended_with(history.active.epoch))


def dropped(end: int) -> EpochHistory:
    """The same after its epoch was dropped as well."""
    return without_epochs(removed(end), 1)


def asked(history: EpochHistory, reader: LogReader, place: int | None = None) -> tuple[SN, SN]:
    """The last record, and the last one of a key since a place, where the active segment is empty."""
    tails, lineage = LineageTails(SegmentPlaces(STREAM).of), KeyLineage(history, 0.5)
    questions = tails.last(lineage, None, 0), tails.last(lineage, KEY, 0, place)
    last, last_of = (ask(question, reader, Deadline(math.inf)) for question in questions)
    return last, last_of


def test_where_nothing_was_ever_written_nothing_stands(reader: LogReader) -> None:
    assert asked(EpochHistory.create(even_ranges(1), 0), reader) == (EMPTY, EMPTY)
    for gone in (removed, dropped):
        assert asked(gone(0), reader) == (EMPTY, EMPTY), "an empty segment takes nothing with it"


@pytest.mark.parametrize("gone", [removed, dropped])
def test_of_a_segment_that_is_gone_nobody_can_tell(reader: LogReader, gone: Callable[[int], EpochHistory]) -> None:
    assert asked(gone(5), reader) == (ANY, ANY)
    assert asked(gone(5), reader, place=3)[1] == ANY, "a record of the key may have stood at sequence id 4"
    assert asked(gone(5), reader, place=4)[1] == EMPTY, "whatever came later would stand in the successor"

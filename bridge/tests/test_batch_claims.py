"""Batches that lie: each claim is wrong once, and every walker refuses it, at the price of the bytes there are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any, Final

import pytest

from bridge.tests.batch_makers import LIES, Lie, forged, record
from rollbridge.base.ids import SegmentId
from rollbridge.consumer.fetched_ranges import FetchedRange
from rollbridge.consumer.records import Origin
from rollbridge.errors import CorruptDataError
from rollbridge.kafka import columns
from rollbridge.kafka.committed import committed_records, seen_in, signed_batch
from rollbridge.kafka.fetch_plan import Fetched
from rollbridge.kafka.records import (
    DECOMPRESSED_BYTES_MAX,
    FetchedBatches,
    LogRecord,
    check_crc,
    check_numbering,
    parse_header,
    read_chunks,
    read_records,
    rebatch,
)
from rollbridge.stream.names import PlaceIndex, SegmentPlaces, StreamName

STREAM = SegmentPlaces(StreamName.parse("shop/orders"))
SEGMENT = SegmentId.of(0, 0)
ODD = record(0, headers=1, tail=b"\2\xff\1")
"""A record with a header name that is not UTF-8, behind which Python reads."""
SOUND = record(0, headers=1, tail=b"\2h\2x")


def fetched(batch: bytes) -> Fetched:
    return Fetched(STREAM.of(SEGMENT), 0, 10, FetchedBatches(batch), [], 10, 10)


def reader(batch: bytes) -> FetchedRange:
    return FetchedRange(fetched(batch), SEGMENT, range(10), Origin(lambda _: None, index=PlaceIndex([STREAM])))


def by_columns(batch: bytes) -> list[Any]:
    found, _ = columns.committed_columns(batch, 0, [])
    list(columns.headers_of(found))
    return found.offset.tolist()  # type: ignore[no-any-return]


WALKERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "records": lambda batch: list(read_records(batch)),
    "chunks by their ends": lambda batch: list(read_chunks(batch, by_ends=True)),
    "follower": lambda batch: list(fetched(batch).records()),
    "committed": lambda batch: committed_records(batch, 0, []).records,
    "columns": by_columns,
    "heads": lambda batch: seen_in(batch, 0),
    "verify": lambda batch: [signed_batch(header, found) for header, found in FetchedBatches(batch)],
    "reader": lambda batch: list(reader(batch).records()),
    "reader of values": lambda batch: [one.values() for one in reader(batch).batches()],
}
APPENDERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "leader": check_numbering,
    "leader of one": lambda batch: rebatch([batch], 1 << 20),
    "leader of two": lambda batch: rebatch([batch, forged(SOUND, 1)], 1 << 20),
}
"""Walkers of batches to be appended, which no compaction has thinned."""
ALL: Final = {**WALKERS, **APPENDERS}
TRUSTING: Final = {"chunks by their ends", "reader", "reader of values"}
"""Walkers that trust a number between two that are right, for their speed: no reader's position comes of it."""


made = cache(Lie.batch)


@pytest.mark.parametrize("walker", ALL)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_every_walker(lie: str, walker: str) -> None:
    if (lie.endswith("inside") and walker in TRUSTING) or (walker == "leader of two" and lie.startswith("number")):
        return  # who joins batches numbers their records again
    for before, codec in product((SOUND, ODD), (0, 4)):
        if walker.startswith("leader") and (codec or "compress" in lie):
            continue  # left to brokers, which look into compressed batches
        batch = made(LIES[lie], before, codec)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptDataError):
                ALL[walker](batch)
            most = 4 * DECOMPRESSED_BYTES_MAX if "compress" in lie else 1 << 20
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("before", [SOUND, ODD], ids=["compiled", "python"])
@pytest.mark.parametrize("walker", ALL)
def test_what_does_not_lie_is_taken(walker: str, before: bytes) -> None:
    if walker in WALKERS:
        WALKERS[walker](Lie(lambda n: record(n) + record(n + 2), count=2, last=5).batch(before))
    elif before == SOUND:
        APPENDERS[walker](Lie().batch(before))


@pytest.mark.parametrize("before", [SOUND, ODD], ids=["compiled", "python"])
def test_lengths_below_0_are_null_as_for_kafka(before: bytes) -> None:
    batch = Lie(lambda n: record(n, b"", key_size=-2, value_size=-3, headers=1, tail=b"\2h\3")).batch(before)
    assert list(read_records(batch))[1] == LogRecord(1, 0, None, None, [("h", None)])
    found, _ = columns.committed_columns(batch, 0, [])
    assert (found.key.end < found.key.start).tolist() == [True, True]
    assert (found.value.end < found.value.start).tolist() == [False, True]
    second = next(iter(columns.headers_of(found))).value
    assert (second.end < second.start).tolist() == [before == ODD, True]


@pytest.mark.parametrize("before", [SOUND, ODD], ids=["compiled", "python"])
def test_records_before_a_lie_are_handed_out(before: bytes) -> None:
    found = read_records(Lie(lambda n: record(n) + record(n + 1, headers=1), count=2).batch(before))
    assert [next(found).offset, next(found).offset] == [0, 1]
    with pytest.raises(CorruptDataError, match=r"record 2 of 3|1 headers in 0 bytes"):
        next(found)


def test_a_wrong_checksum_is_found() -> None:
    batch = forged(record(0), 1, crc=7)
    with pytest.raises(CorruptDataError, match="checksum"):
        check_crc(parse_header(batch), batch)
    with pytest.raises(CorruptDataError, match="checksum"):
        FetchedBatches(batch).check()
    with pytest.raises(CorruptDataError, match="checksum"):
        columns.committed_columns(batch, 0, [])

"""What a reader hands out of fetched batches: against the records that they were made of, whatever is asked for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.attribution import RECORD_HEADER, append_step, pack_run, unpack_run
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.consumer import fetched_ranges
from rollbridge.consumer.fetched_ranges import Batch, FetchedRange
from rollbridge.consumer.records import Origin, Record
from rollbridge.errors import CorruptDataError
from rollbridge.kafka.committed import AbortedSpan
from rollbridge.kafka.fetch_plan import Fetched
from rollbridge.kafka.records import HEADER_BYTES, BatchHeader, Compression, batch_of_one, new_builder, parse_header
from rollbridge.stream.names import PlaceIndex, SegmentPlaces, StreamName

STREAM = SegmentPlaces(StreamName.parse("shop/orders"))
SEGMENT = SegmentId.of(0, 0)
PLACE = STREAM.of(SEGMENT)
ORIGIN = Origin(lambda _: None, index=PlaceIndex([STREAM]))
TRANSACTIONAL, CONTROL = 0x10, 0x20
Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Stored:
    """A record as it was written."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: Headers
    transaction: TransactionId | None = None
    local: int | None = None


@dataclass
class Log:
    """Batches, and what a reader must be given of them."""

    raw: list[bytes] = field(default_factory=list)
    visible: list[Stored] = field(default_factory=list)
    aborted: list[AbortedSpan] = field(default_factory=list)
    end: int = 0

    def fetched(self, start: int = 0) -> Fetched:
        """What a broker answers from an offset on: whole batches."""
        found = [(header, memoryview(raw)) for raw in self.raw if last_of(header := parse_header(raw)) >= start]
        return Fetched(PLACE, start, self.end, found, self.aborted, self.end, self.end)


def last_of(header: BatchHeader) -> int:
    return header.base_offset + header.last_offset_delta


def batch(
    base: int,
    records: list[Stored],
    size: int,
    *,
    codec: Compression = Compression.NONE,
    producer: int = -1,
    attributes: int = 0,
) -> bytes:
    """A batch of ``size`` offsets of which compaction has left some records, or none."""
    builder = new_builder(1 << 20, codec)
    for record in records:
        builder.append(record.offset - base, record.timestamp, record.key, record.value, record.headers)
    raw = bytearray(builder.build())
    if not records:
        del raw[HEADER_BYTES:]
        struct.pack_into(">i", raw, 8, HEADER_BYTES - 12)
        codec = Compression.NONE
    struct.pack_into(">q", raw, 0, base)
    struct.pack_into(">h", raw, 21, codec | attributes)
    struct.pack_into(">i", raw, 23, size - 1)
    struct.pack_into(">q", raw, 43, producer)
    return bytes(raw)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    for _ in range(draw(st.integers(0, 6))):
        base, size = log.end, draw(st.integers(1, 7))
        records: list[Stored] = []
        while len(records) < size:
            offset = base + len(records)
            transaction = draw(st.none() | st.integers(0, 9).map(lambda number: TransactionId.of(1, number)))
            count = draw(st.integers(1, size - len(records)))
            headers: Headers = draw(st.sampled_from([[], [("h", b"1")], [("h", None), ("g", b"")]]))
            steps = draw(st.lists(st.integers(1, 300), min_size=count - 1, max_size=count - 1))
            first, packed = draw(st.integers(0, 1000)), bytearray()
            for step in steps:
                append_step(packed, step)
            for place in range(count):
                own: Headers = []
                if transaction is not None and place == 0:
                    own = [(RECORD_HEADER, pack_run(transaction.bytes, first, count, packed))]
                local = None if transaction is None else first + sum(steps[:place])
                value = draw(st.none() | st.binary(max_size=3))
                moment = 1_000 + draw(st.integers(-5, 5))
                records.append(
                    Stored(offset + place, b"%d" % (offset + place), value, moment, headers + own, transaction, local)
                )
        kept = draw(st.sampled_from([records, records, records[:-1], records[::2], []]))
        codec, is_aborted = draw(st.sampled_from(list(Compression))), draw(st.integers(0, 4)) == 0
        if is_aborted:
            log.raw.append(batch(base, kept, size, codec=codec, producer=7, attributes=TRANSACTIONAL))
            log.aborted.append(AbortedSpan(7, base))
            marker = Stored(base + size, struct.pack(">hh", 0, 0), b"", 0, [])
            log.raw.append(batch(base + size, [marker], 1, producer=7, attributes=TRANSACTIONAL | CONTROL))
            log.end += 1
        else:
            log.raw.append(batch(base, kept, size, codec=codec))
            log.visible += attributed(kept)
        log.end += size
    return log


def attributed(kept: list[Stored]) -> list[Stored]:
    """Records of a run whose first one is gone say nothing of who wrote them."""
    found: list[Stored] = []
    known: TransactionId | None = None
    heads = {id(record) for record in kept if any(name == RECORD_HEADER for name, _ in record.headers)}
    run: tuple[TransactionId | None, int] = (None, 0)
    for record in kept:
        if id(record) in heads:
            value = next(value for name, value in record.headers if name == RECORD_HEADER)
            known, run = (
                record.transaction,
                (record.transaction, record.offset + unpack_run(value or b"").records),
            )
        within = known is not None and record.offset < run[1]
        found.append(
            Stored(
                record.offset,
                record.key,
                record.value,
                record.timestamp,
                record.headers,
                record.transaction if within else None,
                record.local if within else None,
            )
        )
    return found


def check(found: list[Record], expected: list[Stored]) -> None:
    assert [(item.offset, item.key, item.value, item.timestamp_ms) for item in found] == [
        (item.offset, item.key, item.value, item.timestamp) for item in expected
    ]
    for record, wanted in zip(found, expected, strict=True):
        assert record.headers == [item for item in wanted.headers if item[0] != RECORD_HEADER]
        assert (record.stream, record.segment, record.topic, record.committed) == (
            "shop/orders",
            SEGMENT,
            PLACE[0],
            True,
        )
        raw = record.raw
        assert (raw.topic(), raw.partition(), raw.offset()) == (*PLACE, wanted.offset)
        assert (raw.key(), raw.value(), raw.timestamp()) == (wanted.key, wanted.value, (1, wanted.timestamp))
        assert raw.headers() == (wanted.headers or None)


@given(logs(), st.data())
def test_every_record_that_is_wanted_is_handed_out_once_however_it_is_asked_for(log: Log, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, log.end), label="start")
    stop = data.draw(st.integers(start, log.end), label="stop")
    expected = [item for item in log.visible if start <= item.offset < stop]
    stretch = FetchedRange(log.fetched(start), SEGMENT, range(start, stop), ORIGIN)
    assert stretch.is_empty() <= (not expected)
    found: list[Record] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetched_ranges, "BATCH_MAX", data.draw(st.integers(1, 8), label="records of a batch"))
        patch.setattr(fetched_ranges, "_CHUNK", data.draw(st.integers(1, 4), label="records of a chunk"))
        records: Iterator[Record] = stretch.records()
        while not stretch.is_exhausted:
            assert stretch.is_used_up() == (len(found) == len(expected))
            assert start <= stretch.next <= stop
            behind = [item.offset for item in expected[: len(found)]]
            assert stretch.next > behind[-1] if behind else stretch.next >= start
            rest = expected[len(found) :]
            assert not rest or stretch.next <= rest[0].offset
            match data.draw(st.sampled_from(["go on", "begin again", "batch"]), label="how"):
                case "go on":
                    found += islice(records, data.draw(st.integers(1, 5), label="how many"))
                case "begin again":
                    records = stretch.records()
                    found += islice(records, data.draw(st.integers(0, 5), label="how many"))
                case _:
                    one = next(stretch.batches(), None)
                    records = stretch.records()
                    if one is not None:
                        assert one.keys() == [item.key for item in one]
                        assert one.values() == [item.value for item in one]
                        assert len(one) == len(list(one))
                        assert one[0] == next(iter(one[:1]))
                        found += one
    assert stretch.is_used_up()
    check(found, expected)
    # Long after, and in any order, each says who wrote it.
    for record, wanted in reversed(list(zip(found, expected, strict=True))):
        assert (record.transaction_id, record.local_sequence) == (wanted.transaction, wanted.local)


def handed_out(*raw: bytes, count: int) -> FetchedRange:
    found = [(parse_header(item), memoryview(item)) for item in raw]
    return FetchedRange(Fetched(PLACE, 0, count, found, [], count, count), SEGMENT, range(count), ORIGIN)


def stored(offset: int, headers: Headers | None = None) -> Stored:
    return Stored(offset, b"k", b"%d" % offset, 1, headers or [])


def value_of(record: Record) -> bytes | None:
    return record.value


def values(records: Iterator[Record] | Batch) -> list[bytes | None]:
    return [*map(value_of, records)]


@pytest.mark.parametrize("singly", [True, False])
def test_a_record_that_does_not_parse_stops_the_reader_in_front_of_it(singly: bool) -> None:
    sound = batch(0, [stored(0), stored(1)], 2)
    broken = bytearray(batch(2, [stored(2), stored(3)], 2))
    broken[-1] = 2  # the second record has a header that is not there
    stretch = handed_out(sound, bytes(broken), batch(4, [stored(4)], 1), count=5)
    found: list[bytes | None] = []

    def read_on() -> None:
        if singly:
            found.extend(map(value_of, stretch.records()))
        else:
            found.extend(value for one in stretch.batches() for value in one.values())

    for _ in range(3):
        with pytest.raises(CorruptDataError, match="does not parse"):
            read_on()
        assert not stretch.is_exhausted
        assert stretch.next <= 3
    assert found[:2] == [b"0", b"1"]
    assert b"4" not in found
    assert len(found) == len(set(found))


@pytest.mark.parametrize("read", [FetchedRange.records, FetchedRange.batches])
def test_a_number_outside_of_its_batch_does_not_hide_records_of_others(read: Callable[[FetchedRange], object]) -> None:
    stretch = handed_out(batch(0, [stored(0), stored(7)], 2), batch(2, [stored(2)], 1), count=3)
    with pytest.raises(CorruptDataError, match="is numbered 7, in a batch of offsets 0 to 1"):
        list(read(stretch))  # type: ignore[call-overload]


@pytest.mark.parametrize("taken", range(4))
def test_a_number_inside_of_a_batch_moves_no_reader(taken: int) -> None:
    raw = batch(0, [stored(0), stored(1_000), stored(2)], 3), batch(3, [stored(3)], 1)
    stretch = handed_out(*raw, count=4)
    found = values(islice(stretch.records(), taken))
    assert stretch.next == taken
    if taken in (1, 2):  # it begins within the batch, where each number counts
        with pytest.raises(CorruptDataError, match="is numbered 1000"):
            list(stretch.records())
    else:
        assert found + values(stretch.records()) == [b"0", b"1000", b"2", b"3"]


def test_names_that_are_not_utf_8_are_no_hindrance() -> None:
    name = "\udcff"
    odd = bytearray(batch_of_one(1, b"k", b"odd", [(name, b"1"), (RECORD_HEADER, pack_run(bytes(16), 5, 1, b""))]))
    struct.pack_into(">q", odd, 0, 1)
    raw = batch(0, [stored(0)], 1), bytes(odd), batch(2, [stored(2)], 1)
    assert values(handed_out(*raw, count=3).records()) == [b"0", b"odd", b"2"]
    stretch = handed_out(*raw, count=3)
    found = [record for one in stretch.batches() for record in one]
    assert values(iter(found)) == [b"0", b"odd", b"2"]
    with pytest.raises(CorruptDataError, match="key and value can be read without"):
        _ = found[1].headers
    assert found[1].local_sequence == 5
    assert found[1].raw.value() == b"odd"


def test_a_header_of_a_stranger_ends_a_run_and_begins_none() -> None:
    run = [(RECORD_HEADER, pack_run(TransactionId.of(0, 1).bytes, 10, 4, b""))]
    records = [stored(0, list(run)), stored(1), stored(2, [(RECORD_HEADER, b"x" * 99)]), stored(3)]
    found = list(handed_out(batch(0, records, 4), count=4).records())
    assert [item.local_sequence for item in found] == [10, 11, None, None]
    # One that is noted twice is noted once: batches are decoded again.
    shared = found[0][3]
    shared.note(0, [], 3)
    shared.note(0, list(run), 3)
    assert [item.local_sequence for item in found] == [10, 11, None, None]


def test_a_run_that_claims_more_than_its_batch_has_ends_with_it() -> None:
    run = [(RECORD_HEADER, pack_run(TransactionId.of(0, 1).bytes, 10, 4, b""))]
    raw = batch(0, [stored(0, list(run)), stored(1)], 2), batch(2, [stored(2)], 1), batch(3, [stored(3)], 1)
    found: list[Record] = list(handed_out(*raw, count=4).records())
    assert [item.local_sequence for item in found] == [10, 11, None, None]
    found = [record for one in handed_out(*raw, count=4).batches() for record in one]
    assert [item.local_sequence for item in found] == [10, 11, None, None]


def test_small_batches_of_several_leaders_and_clocks_keep_what_is_theirs() -> None:
    raw = [bytearray(batch(number, [stored(number)], 1)) for number in range(5)]
    for number, item in enumerate(raw):
        struct.pack_into(">i", item, 12, number // 2)
    struct.pack_into(">i", raw[4], 12, 1)
    struct.pack_into(">h", raw[4], 21, 0x08)
    struct.pack_into(">q", raw[4], 35, 77)
    found = [record.raw for record in handed_out(*map(bytes, raw), count=5).records()]
    assert [item.leader_epoch() for item in found] == [0, 0, 1, 1, 1]
    assert [item.timestamp() for item in found] == [*[(1, 1)] * 4, (2, 77)]


def test_nothing_beyond_the_end_is_handed_out_of_a_batch_that_reaches_there() -> None:
    raw = batch(0, [stored(0)], 1), batch(1, [stored(1), stored(2), stored(3)], 3)
    whole = handed_out(*raw, count=4)
    cut = FetchedRange(whole._fetched, SEGMENT, range(2), ORIGIN)
    assert [value for one in cut.batches() for value in one.values()] == [b"0", b"1"]
    assert values(FetchedRange(whole._fetched, SEGMENT, range(2), ORIGIN).records()) == [b"0", b"1"]


def test_what_was_handed_out_before_an_odd_name_is_not_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_ranges, "_CHUNK", 1)
    monkeypatch.setattr(fetched_ranges, "_SMALL", 0)
    raw = batch(0, [stored(0), stored(1), stored(2, [("zz", b"1")]), stored(3)], 4).replace(b"zz", b"\xff\xfe")
    assert values(handed_out(raw, count=4).records()) == [b"0", b"1", b"2", b"3"]

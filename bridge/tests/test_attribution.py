"""Who wrote a record: headers of runs, and how each reader finds the record's own part of them, from any start."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tests.strategies import histories, segment_ids, transaction_ids
from rollbridge.base.attribution import (
    HEADER_VALUE_BYTES,
    RECORD_HEADER,
    append_step,
    own_header,
    pack_record_header,
    pack_run,
    unpack_record_header,
    unpack_run,
)
from rollbridge.base.avro import encode_long
from rollbridge.base.ids import SegmentId, TransactionId, local_sequence
from rollbridge.base.sn import DLSN
from rollbridge.consumer.fetched_ranges import FetchedRange, RecordContext, StoredRecord
from rollbridge.consumer.records import NUMBERS_MAX, RUNS_MAX, Origin, Writers, message_of
from rollbridge.errors import InvalidRequestError, NotFoundError, TruncatedError
from rollbridge.kafka.columns import committed_columns
from rollbridge.kafka.committed import FetchedHeads, attributed, committed_records, seen_in, signed_batch
from rollbridge.kafka.fetch_plan import Fetched
from rollbridge.kafka.records import BatchBuilder, LogRecord, crc32c, framed, parse_header, read_records, rebatch
from rollbridge.kafka.segment_tail import sn_of
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition

T = TransactionId.of(3, 42)
PLACE: Partition = ("sales.orders.0.#epoch.0", 0)
VECTORS = json.loads((Path(__file__).parents[2] / "schemas/vectors/record_header.json").read_text(encoding="utf-8"))
Written = tuple[TransactionId | None, int]


def packed(transaction: TransactionId, sequences: Sequence[int]) -> bytes:
    """The header of a run with these local sequence numbers."""
    steps = bytearray()
    for before, after in itertools.pairwise(sequences):
        append_step(steps, after - before)
    return pack_run(transaction.bytes, sequences[0], len(sequences), steps)


# The header


@pytest.mark.parametrize("vector", VECTORS)
def test_the_header_of_a_run_is_as_the_vectors_say(vector: dict[str, Any]) -> None:
    transaction, sequences = TransactionId.parse(vector["transaction"]), vector["sequences"]
    header = bytes.fromhex(vector["header"])
    assert packed(transaction, sequences) == header
    found = unpack_run(header)
    assert (found.transaction, list(found.sequences())) == (transaction.bytes, sequences)
    if len(sequences) == 1:
        assert pack_record_header(transaction, sequences[0]) == header


def test_many_records_that_follow_each_other_take_a_number() -> None:
    assert len(packed(T, range(100_000))) == HEADER_VALUE_BYTES + 1 + 3


_sequences = st.tuples(
    st.integers(0, 1 << 39), st.lists(st.one_of(st.just(1), st.integers(1, 300), st.integers(1, 1 << 39)), max_size=40)
).map(lambda drawn: list(itertools.accumulate(drawn[1], initial=drawn[0])))


@given(st.integers(0, 65_535), st.integers(0, (1 << 90) - 1), _sequences)
def test_what_a_run_says_is_read_back(epoch: int, counter: int, sequences: list[int]) -> None:
    transaction = TransactionId.of(epoch, counter)
    found = unpack_run(packed(transaction, sequences))
    assert found.transaction == transaction.bytes
    assert list(found.sequences()) == sequences
    assert unpack_record_header(packed(transaction, sequences)) == (transaction, sequences[0])


@pytest.mark.parametrize(
    "value",
    [
        b"",
        bytes(HEADER_VALUE_BYTES - 1),
        b"\xff" * HEADER_VALUE_BYTES,
        pack_record_header(T, 1) + b"\1",
        pack_record_header(T, 1) + b"\1\0",
        pack_record_header(T, 1) + b"\1\1",
        pack_record_header(T, 1) + b"\1\x80",
        pack_record_header(T, 1) + b"\1\3\1",
        pack_record_header(T, 1) + b"\1\3\1\1\1",
        pack_record_header(T, 1) + b"\1\3\1\x80",
        pack_record_header(T, 1) + b"\1" + b"\xff" * 30,
        pack_record_header(T, 1 << 63),
        pack_record_header(T, (1 << 63) - 1) + b"\1\2",
        pack_record_header(T, (1 << 64) - 1) + b"\2",
        pack_record_header(T, 1) + b"\1\2" + b"\xff" * 9 + b"\1",
        pack_record_header(T, 1) + b"\1\xff\xff\xff\xff\x0f",
    ],
)
def test_a_header_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        unpack_run(value)


def test_of_a_later_version_the_first_record_is_known() -> None:
    found = unpack_run(pack_record_header(T, 7) + b"\2whatever it says")
    assert (found.transaction, found.records, list(found.sequences())) == (T.bytes, 1, [7])


# Logs, as leaders and plain writers write them


@dataclass
class Log:
    """Batches one behind the other, and who wrote each record; offsets have gaps where markers stand."""

    batches: list[list[LogRecord]]
    written: dict[int, Written]

    def from_offset(self, offset: int) -> Iterator[LogRecord]:
        """What a native consumer hands out."""
        return (record for batch in self.batches for record in batch if record.offset >= offset)

    def look(self, place: Partition, offset: int) -> FetchedHeads:
        """What a broker returns for an offset: the batch that holds it, and the next one."""
        assert place == PLACE
        at = next(number for number, batch in enumerate(self.batches) if batch[-1].offset >= offset)
        return seen_in(b"".join(_stamped(batch) for batch in self.batches[at : at + 2]), offset)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log, offset = Log([], {}), draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, 8))):
        parts: list[bytes] = []
        written: list[Written] = []
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 6))
            sequences = draw(_sequences)[:size]
            transaction = draw(st.sampled_from([None, TransactionId.of(0, number), TransactionId.of(1, number)]))
            each = draw(st.booleans())
            builder = BatchBuilder(1 << 20)
            for place, sequence in enumerate(sequences):
                headers: list[tuple[str, bytes | None]] = [("user", b"x")] * draw(st.integers(0, 1))
                if transaction is not None and each:
                    headers.append((RECORD_HEADER, pack_record_header(transaction, sequence)))
                elif transaction is not None and place == 0:
                    headers.append((RECORD_HEADER, packed(transaction, sequences)))
                elif transaction is None and draw(st.integers(0, 5)) == 0:
                    headers.append((RECORD_HEADER, draw(st.sampled_from([b"", b"theirs", b"\xff" * 30]))))
                builder.append(1, b"k", b"v", headers)
                written.append((transaction, -1 if transaction is None else sequence))
            parts.append(builder.build())
        # Small frames of several transactions are joined by the leader.
        [joined] = rebatch(parts, 1 << 20).batches
        batch = [record._replace(offset=offset + record.offset) for record in read_records(joined)]
        log.batches.append(batch)
        log.written |= dict(enumerate(written, offset))
        offset += len(batch) + draw(st.integers(0, 2))
    return log


def written_by(record: LogRecord) -> Written:
    """What the header of a record says, which stands for itself."""
    value = own_header(record.headers)
    if value is None:
        return None, -1
    try:
        return unpack_record_header(value)
    except InvalidRequestError:
        return None, -1


@given(logs())
def test_each_record_of_a_batch_gets_a_header_of_its_own(log: Log) -> None:
    found = {record.offset: written_by(record) for batch in log.batches for record in attributed(batch)}
    assert found == log.written
    kept = [[item for item in record.headers if item[0] == "user"] for batch in log.batches for record in batch]
    assert kept == [
        [item for item in record.headers if item[0] == "user"] for batch in log.batches for record in attributed(batch)
    ]


@given(logs(), st.data())
def test_compaction_takes_nobody_else_s_number(log: Log, data: st.DataObject) -> None:
    for batch in log.batches:
        left = [record for record in batch if data.draw(st.booleans())]
        for record in attributed(left):
            assert written_by(record) in (log.written[record.offset], (None, -1))


# What a native consumer hands out


def message(record: LogRecord) -> Message:
    return message_of(PLACE, record, 1, 0)


@given(logs(), st.data())
@settings(deadline=None)
def test_a_consumer_knows_who_wrote_what_it_has_handed_out_from_any_start(log: Log, data: st.DataObject) -> None:
    offsets = sorted(log.written)
    writers = Writers(log.look)
    held: list[LogRecord] = []
    for _ in range(data.draw(st.integers(1, 3))):
        # It begins somewhere, or goes back or ahead; and reads on in pieces.
        rest = list(log.from_offset(data.draw(st.sampled_from(offsets))))
        while rest:
            some = rest[: data.draw(st.integers(1, len(rest)))]
            rest = rest[len(some) :] if data.draw(st.booleans()) else []
            writers.handed_out([message(record) for record in some])
            held += some
            for record in data.draw(st.lists(st.sampled_from(held), max_size=5)):
                assert found_by(writers, record) == log.written[record.offset]
    for record in held:
        assert found_by(writers, record) == log.written[record.offset]


def found_by(writers: Writers, record: LogRecord) -> Written:
    """As the attributes of a record find it: by its own header, if it has one."""
    if own_header(record.headers) is not None:
        try:
            return unpack_record_header(own_header(record.headers) or b"")
        except InvalidRequestError:
            return None, -1
    found = writers.find(PLACE, record.offset)
    return (None, -1) if found is None else (TransactionId.from_bytes(found[0]), found[1])


def one_frame(first: int, records: int, headers: bool = True) -> list[LogRecord]:
    head = [(RECORD_HEADER, packed(T, range(records)))] if headers else []
    return [LogRecord(first + place, 1, b"k", b"v", [*head] if place == 0 else []) for place in range(records)]


def test_nobody_is_asked_where_reading_began_with_a_batch() -> None:
    def look(place: Partition, offset: int) -> FetchedHeads:
        raise AssertionError(f"{place} is fetched again at {offset}")

    writers = Writers(look)
    writers.handed_out([message(record) for record in one_frame(0, 5)[:2]])
    assert writers.find(PLACE, 1) == (T.bytes, 1)
    writers.handed_out([message(record) for record in one_frame(0, 5)[2:] + one_frame(5, 3, headers=False)])
    assert writers.find(PLACE, 4) == (T.bytes, 4)
    assert [writers.find(PLACE, offset) for offset in (5, 6, 7)] == [None] * 3


def test_a_broker_is_asked_once_where_reading_began_within_a_batch() -> None:
    asked: list[int] = []
    log = Log([one_frame(0, 5), one_frame(5, 5), one_frame(10, 3, headers=False)], {})

    def look(place: Partition, offset: int) -> FetchedHeads:
        asked.append(offset)
        return log.look(place, offset)

    writers = Writers(look)
    writers.handed_out([message(record) for record in itertools.islice(log.from_offset(2), 9)])
    assert [writers.find(PLACE, offset) for offset in (2, 3, 7, 10)] == [(T.bytes, 2), (T.bytes, 3), (T.bytes, 2), None]
    writers.handed_out([message(record) for record in log.from_offset(11)])
    assert [writers.find(PLACE, offset) for offset in (11, 12)] == [None, None]
    assert asked == [2], "once, and no more for what follows without a gap"


def test_a_broker_is_asked_again_where_reading_goes_on_within_another_batch() -> None:
    log = Log([one_frame(0, 5), one_frame(5, 5)], {})
    writers = Writers(log.look)
    writers.handed_out([message(record) for record in log.batches[0]])
    assert writers.find(PLACE, 4) == (T.bytes, 4)
    writers.handed_out([message(record) for record in log.batches[1][3:]])
    assert writers.find(PLACE, 8) == (T.bytes, 3)
    # What is fetched for something else says nothing of it.
    log = Log([one_frame(5 * number, 5) for number in range(6)], {})
    writers = Writers(log.look)
    for batch in (log.batches[0], log.batches[5]):
        writers.handed_out([message(record) for record in batch[2:]])
        assert writers.find(PLACE, 3) == (T.bytes, 3)
    assert writers.find(PLACE, 28) == (T.bytes, 3)


def test_a_consumer_that_goes_back_knows_what_it_is_handed_again() -> None:
    log = Log([one_frame(5 * number, 5) for number in range(6)], {})
    writers = Writers(log.look)
    for first in (20, 5, 10, 0):
        writers.handed_out([message(record) for record in itertools.islice(log.from_offset(first), 7)])
        for offset in range(first, first + 7):
            assert offset % 5 == 0 or writers.find(PLACE, offset) == (T.bytes, offset % 5)
    assert writers.find(PLACE, 24) == (T.bytes, 4)


def test_numbers_of_strangers_take_bounded_memory() -> None:
    tall = pack_run(T.bytes, 0, NUMBERS_MAX // 2, b"\2" * (NUMBERS_MAX // 2 - 1))
    writers = Writers(lambda _, offset: FetchedHeads(range(offset, offset + 1), []))
    found = []
    for place in range(8):
        head = LogRecord(place * NUMBERS_MAX, 1, b"k", b"v", [(RECORD_HEADER, tall)])
        writers.handed_out([message(head)])
        found.append(writers.find(PLACE, place * NUMBERS_MAX + 3))
    assert found == [(T.bytes, 6)] * 8
    assert sum(writers.find(PLACE, place * NUMBERS_MAX + 3) is not None for place in range(8)) <= 2


def test_what_was_long_ago_is_forgotten_and_fetched_again() -> None:
    log = Log([one_frame(5 * number, 5) for number in range(RUNS_MAX + 10)], {})
    writers = Writers(log.look)
    for batch in log.batches:
        writers.handed_out([message(record) for record in batch])
        assert writers.find(PLACE, batch[-1].offset) == (T.bytes, 4)
    assert writers.find(PLACE, 3) == (T.bytes, 3)
    # All at once, and asked for in any order.
    several = Writers(log.look)
    assert several.find(PLACE, 1) == (T.bytes, 1)
    several.handed_out([message(record) for batch in log.batches for record in batch])
    for offset in (*range(0, 5 * len(log.batches), 97), 1, 2, 3):
        if offset % 5:
            assert several.find(PLACE, offset) == (T.bytes, offset % 5)


@pytest.mark.parametrize("jump", [1, 2, 3])
def test_a_start_of_the_log_that_jumps_into_a_frame_is_noticed(jump: int) -> None:
    """The consumer goes on there by itself, and tells nobody."""
    log = Log([one_frame(0, 5), one_frame(5, 5)], {})
    writers = Writers(log.look)
    writers.handed_out([message(record) for record in log.batches[0]])
    assert writers.find(PLACE, 4) == (T.bytes, 4)
    writers.handed_out([message(record) for record in log.batches[1][jump:]])
    assert [writers.find(PLACE, offset) for offset in range(5 + jump, 10)] == [(T.bytes, at) for at in range(jump, 5)]


def test_what_is_held_while_its_frame_is_deleted_is_an_error_and_not_nobody_s() -> None:
    log = Log([one_frame(5 * number, 5) for number in range(4)], {})
    writers = Writers(log.look)
    writers.handed_out([message(record) for record in log.batches[0][2:]])
    del log.batches[:2]
    with pytest.raises(TruncatedError, match="offset 3 of"):
        writers.find(PLACE, 3)


def test_where_compaction_took_the_head_of_a_frame_nobody_knows_who_wrote_the_rest() -> None:
    frames = [one_frame(0, 5), one_frame(5, 5), one_frame(10, 5, headers=False)]
    whole = list(itertools.chain.from_iterable(frames))  # small frames, joined by the leader
    left = [record for record in whole if record.offset not in (1, 5, 12)]
    writers = Writers(lambda _, offset: seen_in(_compacted(whole, left), offset))
    writers.handed_out([message(record) for record in left])
    assert [writers.find(PLACE, offset) for offset in (2, 3, 4)] == [(T.bytes, at) for at in (2, 3, 4)]
    for offset in (6, 9, 10, 14):
        with pytest.raises(NotFoundError, match="compaction has taken"):
            writers.find(PLACE, offset)
    # A plain writer's records belong to no transaction whatever is missing; nor do those of a native transaction that
    # is no leader's, if its first record is there.
    plain = one_frame(0, 5, headers=False)
    for batch in (_compacted(plain, plain[2:], transactional=False), _compacted(plain, [plain[0], *plain[2:]])):
        found = seen_in(batch, 3)
        assert (found.heads, found.doubtful) == ([], frozenset())


_UNKNOWN = "unknown"


@given(st.data())
@settings(deadline=None)
def test_all_readers_say_the_same_of_a_batch_that_was_compacted(data: st.DataObject) -> None:
    """Who wrote a record is what was written, or cannot be known: nobody says that it is no transaction's."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    begins = [0, *itertools.accumulate(sizes)]
    whole = [record for first, size in zip(begins, sizes, strict=False) for record in one_frame(first, size)]
    left = [record for record in whole if data.draw(st.booleans(), label=f"{record.offset} is left")]
    batches = [_compacted(whole, left)]
    if data.draw(st.booleans(), label="another batch"):
        batches.append(_compacted(one_frame(len(whole), 3), one_frame(len(whole), 3)))
        left += one_frame(len(whole), 3)
    found = _by_reader(batches, whole[-1].offset + 4)
    assert found["reader"] == found["consumer"] == found["spark"]
    truth = {first + place: (T, place) for first, size in zip(begins, sizes, strict=False) for place in range(size)}
    truth |= {len(whole) + place: (T, place) for place in range(3)}
    assert {record.offset for record in left} == set(found["reader"])
    for offset, written in found["reader"].items():
        head = max(begin for begin in begins if begin <= offset)
        assert written == (truth[offset] if head in found["reader"] else _UNKNOWN)


def _by_reader(batches: list[bytes], end: int) -> dict[str, dict[int, Any]]:
    """What each reader says of the records of some batches, by offset."""

    def ask(look: Callable[[], object]) -> object:
        try:
            return look()
        except NotFoundError:
            return _UNKNOWN

    raw = b"".join(batches)
    headers = [(parse_header(batch), memoryview(batch)) for batch in batches]
    origin = Origin(lambda _: None)
    stretch = FetchedRange(Fetched(PLACE, 0, end, headers, [], end, end), SegmentId.of(0, 0), range(end), origin)
    stored = list(stretch.records())
    found: dict[str, dict[int, Any]] = {
        "reader": {
            item.offset: ask(lambda item=item: (item.transaction_id, item.local_sequence))  # type: ignore[misc]
            for item in stored
        }
    }
    writers = Writers(lambda _, offset: seen_in(b"".join(it for it in batches if _last(it) >= offset), offset))
    held = [record for batch in batches for record in read_records(batch)]
    writers.handed_out([message(record) for record in held])
    found["consumer"] = {record.offset: ask(lambda record=record: found_by(writers, record)) for record in held}  # type: ignore[misc]
    records, _ = committed_columns(raw, 0, [])
    known, ids, sequences, doubtful = records.writers()
    found["spark"] = {
        offset: _UNKNOWN
        if doubtful[at]
        else (TransactionId.from_bytes(ids[at].tobytes()), int(sequences[at]))
        if known[at]
        else (None, -1)
        for at, offset in enumerate(records.offset.tolist())
    }
    return found


def _last(batch: bytes) -> int:
    header = parse_header(batch)
    return header.base_offset + header.last_offset_delta


def test_a_spark_query_ends_where_nobody_knows_who_wrote_a_record_unless_losses_are_to_be_left_out() -> None:
    pa = pytest.importorskip("pyarrow")
    from rollbridge.spark.planning import SegmentPlace
    from rollbridge.spark.source_task import record_batch

    whole = one_frame(0, 3) + one_frame(3, 3)
    raw = _compacted(whole, [record for record in whole if record.offset != 3])
    records, _ = committed_columns(raw, 0, [])
    place = SegmentPlace("sales/orders", PLACE[0], SegmentId.of(0, 0), None)
    schema = pa.schema([("transactionId", pa.string()), ("localSequence", pa.int64())])

    def rows(chosen: Any, names: Sequence[str] = schema.names, *, fail: bool) -> list[Any]:
        columns = pa.schema([(name, pa.int64() if name == "offset" else schema.field(name).type) for name in names])
        return list(record_batch(chosen, place, names, columns, fail=fail).to_pydict().values())

    assert rows(records.where(slice(3)), fail=True) == [[str(T)] * 3, [0, 1, 2]]
    assert rows(records, ["offset"], fail=True) == [[0, 1, 2, 4, 5]], "nobody asks who wrote them"
    for name in schema.names:
        with pytest.raises(TruncatedError, match=r"compaction .*offset 4 of .*=false"):
            rows(records, [name], fail=True)
    assert rows(records, fail=False) == [[str(T)] * 3 + [None] * 2, [0, 1, 2, None, None]]


def _compacted(whole: list[LogRecord], left: list[LogRecord], *, transactional: bool = True) -> bytes:
    """A batch as the cleaner leaves it: the records that are left, with their offsets, under the header that it had."""

    def sized(content: bytes) -> bytes:
        return encode_long(len(content)) + content

    def encoded(record: LogRecord) -> bytes:
        parts = [b"\0\0", encode_long(record.offset - whole[0].offset), sized(record.key or b"")]
        parts += [sized(record.value or b""), encode_long(len(record.headers))]
        parts += [sized(name.encode()) + sized(value or b"") for name, value in record.headers]
        return sized(b"".join(parts))

    body = b"".join(map(encoded, left))
    batch = bytearray(framed(body, codec=0, count=len(left), base_timestamp=1, max_timestamp=1))
    batch[:8] = whole[0].offset.to_bytes(8, "big")
    batch[21:23] = (0x10 if transactional else 0).to_bytes(2, "big")
    batch[23:27] = (whole[-1].offset - whole[0].offset).to_bytes(4, "big")
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return bytes(batch)


# Spark's columns


@given(logs(), st.data())
@settings(deadline=None)
def test_spark_s_columns_say_the_same_from_any_start(log: Log, data: st.DataObject) -> None:
    raw = b"".join(_stamped(batch) for batch in log.batches)
    start = data.draw(st.sampled_from(sorted(log.written)))
    records, _ = committed_columns(raw, start, [])
    some = records.where(slice(data.draw(st.integers(0, len(records))), None))
    for chosen in (records, some):
        known, ids, sequences, doubtful = chosen.writers()
        assert not doubtful.any()
        found = {
            offset: (TransactionId.from_bytes(ids[at].tobytes()), int(sequences[at])) if known[at] else (None, -1)
            for at, offset in enumerate(chosen.offset.tolist())
        }
        assert found == {offset: log.written[offset] for offset in found}
    assert records.offset.tolist() == [offset for offset in sorted(log.written) if offset >= start]


def test_a_run_may_reach_the_largest_number() -> None:
    last = (1 << 63) - 1
    assert list(unpack_run(pack_record_header(T, last)).sequences()) == [last]
    for steps in (b"\1", b"\2"):
        begin = last - steps[0]
        assert list(unpack_run(pack_run(T.bytes, begin, 2, steps)).sequences()) == [begin, last]


HOSTILE: dict[str, list[tuple[str, bytes | None]]] = {
    "empty": [(RECORD_HEADER, b"")],
    "null": [(RECORD_HEADER, None)],
    "too short": [(RECORD_HEADER, bytes(HEADER_VALUE_BYTES - 1))],
    "no id": [(RECORD_HEADER, b"\xff" * HEADER_VALUE_BYTES)],
    "no id, and a number": [(RECORD_HEADER, b"\xff" * 16 + (7).to_bytes(8, "big"))],
    "2^63": [(RECORD_HEADER, pack_record_header(T, 1 << 63))],
    "2^64 - 1": [(RECORD_HEADER, pack_record_header(T, (1 << 64) - 1))],
    "a run from 2^63 on": [(RECORD_HEADER, pack_record_header(T, 1 << 63) + b"\1\3")],
    "a run that reaches 2^63": [(RECORD_HEADER, pack_record_header(T, (1 << 63) - 2) + b"\1\3")],
    "steps that reach 2^63": [(RECORD_HEADER, pack_run(T.bytes, 1, 3, b"\xff" * 8 + b"\x7f\1"))],
    "of a later version, from 2^63 on": [(RECORD_HEADER, pack_record_header(T, 1 << 63) + b"\2?")],
    "a run of all there can be": [(RECORD_HEADER, pack_record_header(T, 7) + b"\1\xff\xff\xff\xff\7")],
    "a run without end": [(RECORD_HEADER, pack_record_header(T, 7) + b"\1\x80")],
    "a single one in a run": [(RECORD_HEADER, pack_record_header(T, 7))],
    "two": [(RECORD_HEADER, pack_record_header(T, 7)), (RECORD_HEADER, pack_record_header(T, 8))],
    "two, the first of which is none": [(RECORD_HEADER, b"?"), (RECORD_HEADER, pack_record_header(T, 8))],
    "null, and one": [(RECORD_HEADER, None), (RECORD_HEADER, pack_record_header(T, 8))],
}
"""Headers that anybody who may write to a segment can give a record."""


@pytest.mark.parametrize("headers", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_every_reader_takes_a_hostile_header_for_the_same(headers: list[tuple[str, bytes | None]], place: int) -> None:
    from rollbridge.spark.source_task import _Maker

    batch = one_frame(0, 6)
    batch[place] = batch[place]._replace(headers=headers)
    first = _stamped(batch)
    raw = first + _stamped(one_frame(6, 3, headers=False))
    read = committed_records(raw, 0, []).records
    expected = [written_by(record) for record in read]
    assert expected[6:] == [(None, -1)] * 3
    assert all(sequence < 1 << 63 for _, sequence in expected)
    # Spark's columns.
    maker = _Maker(committed_columns(raw, 0, [])[0], None, True)  # type: ignore[arg-type]
    ids, sequences = maker.transaction_id().to_pylist(), maker.local_sequence().to_pylist()
    assert [
        (found and TransactionId.parse(found), -1 if at is None else at)
        for found, at in zip(ids, sequences, strict=True)
    ] == expected
    # The library's readers.
    stored = RecordContext(Origin(lambda _: None), PLACE, parse_header(first))
    for record in batch:
        stored.note(record.offset, record.headers, 5)
    records = [StoredRecord((item.key, item.value, item, stored)) for item in batch]
    assert [
        (found.transaction_id, -1 if found.transaction_id is None else found.local_sequence) for found in records
    ] == expected[:6]
    # Consumers: of what was handed out from the head on, and of what is fetched.
    handed = [message(record) for record in batch]
    for writers in (Writers(lambda _, offset: seen_in(raw, offset)), Writers(lambda _, offset: seen_in(raw, offset))):
        writers.handed_out(handed)
        handed = []
        assert [found_by(writers, record) for record in batch] == expected[:6]
    # `rollbridge doctor --verify`.
    pieces = signed_batch(parse_header(first), first).pieces
    signed = {item.base + at: item.transaction for item in pieces for at in range(item.records)}
    assert signed == {at: item.bytes for at, (item, _) in enumerate(expected) if item is not None}
    # Conditional writers.
    dlsns = [sn_of(record, SegmentId.of(0, 0), 0).dlsn for record in read]
    assert [item and item.local_sequence for item in dlsns] == [max(0, at) for _, at in expected]


def test_a_run_ends_with_its_batch_whatever_its_header_says() -> None:
    forged = one_frame(0, 5)[:2]
    plain = one_frame(2, 3, headers=False)
    records, _ = committed_columns(_stamped(forged) + _stamped(plain), 0, [])
    assert records.writers().known.tolist() == [True, True, False, False, False]
    found = committed_records(_stamped(forged) + _stamped(plain), 0, []).records
    assert [written_by(record) for record in found] == [(T, 0), (T, 1), *[(None, -1)] * 3]


def _stamped(batch: list[LogRecord]) -> bytes:
    builder = BatchBuilder(1 << 20)
    for record in batch:
        builder.append(record.timestamp, record.key, record.value, record.headers)
    return batch[0].offset.to_bytes(8, "big") + builder.build()[8:]


def test_a_part_has_its_place_in_the_number() -> None:
    sequences = [local_sequence(5, count) for count in (0, 1, 9)]
    assert list(unpack_run(packed(T, sequences)).sequences()) == sequences


# DLSNs and the record header: round trips, order, refusals.


offsets = st.integers(0, (1 << 63) - 1)


@given(segment_ids, offsets, offsets)
def test_a_dlsn_reads_back_from_its_text(segment: SegmentId, offset: int, local: int) -> None:
    dlsn = DLSN.of(segment, offset, local)
    assert DLSN.parse(str(dlsn)) == dlsn
    assert dlsn.segment == segment


def test_text_of_a_dlsn() -> None:
    assert str(DLSN(epoch=4, number=0, offset=17, local_sequence=3)) == "4-0:17:3"


@pytest.mark.parametrize(
    "text",
    ["", "4-0:17", "4-0:17:3:1", "4:17:3", "-4-0:17:3", "4-0:-17:3", " 4-0:17:3", "4-0:1_7:3", "+4-0:17:3", "٤-0:1:1"],
)
def test_text_that_is_no_dlsn_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="such as 4-0:17:3"):
        DLSN.parse(text)


@given(histories(), st.floats(0.0, 1.0, exclude_max=True), st.data())
def test_dlsns_of_one_key_sort_in_the_order_of_its_records(
    history: EpochHistory, position: float, data: st.DataObject
) -> None:
    written: list[DLSN] = []
    for record in history.records:
        segment = record.segment_at(position).id
        if not written or written[-1].segment != segment:
            count = data.draw(st.integers(0, 2))
            written.extend(DLSN.of(segment, offset) for offset in range(count))
    assert written == sorted(written)


def test_the_record_header_is_16_bytes_of_id_and_8_of_local_sequence() -> None:
    value = pack_record_header(TransactionId.of(1, 42), 258)
    assert value.hex() == "0001000000000000000000000000002a" + "0000000000000102"


@given(transaction_ids, st.integers(0, (1 << 63) - 1))
def test_the_record_header_round_trips(transaction: TransactionId, local: int) -> None:
    assert unpack_record_header(pack_record_header(transaction, local)) == (transaction, local)


def test_a_header_with_a_foreign_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        unpack_record_header(b"\xff" * HEADER_VALUE_BYTES)

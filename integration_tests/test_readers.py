"""``b.reader``: order across epochs, where to begin, positions, previews of open transactions, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import Any

import pytest

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.command_line import run_cli
from integration_tests.grown_streams import KEYS, grow, write
from integration_tests.kafka_tools import produce
from integration_tests.patience import PATIENCE_S
from rollbridge.base.attribution import RECORD_HEADER
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import TRANSACTION_ID_HEADER
from rollbridge.consumer import reader as reading
from rollbridge.consumer.records import Preview, Record
from rollbridge.errors import CorruptDataError, InvalidRequestError, StreamNotFoundError, TruncatedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch_plan import FetchError
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.records import batch_of_one
from rollbridge.stream.late import LATE_HEADER
from rollbridge.stream.names import SegmentPlaces, StreamName
from rollbridge.stream.positions import ReadPosition

STRANGERS = 30


def by_key(records: Iterable[Record]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for record in records:
        found.setdefault(record.key or b"", []).append(record.value or b"")
    return found


def by_segment(records: Iterable[Record]) -> dict[rollbridge.SegmentId, list[rollbridge.DLSN | None]]:
    """Where the records of each segment stand, in the order in which they came."""
    found: dict[rollbridge.SegmentId, list[rollbridge.DLSN | None]] = {}
    for record in records:
        found.setdefault(record.segment, []).append(record.dlsn)
    return found


def test_every_key_in_its_order_with_all_that_is_known_of_a_record(client: rollbridge.Bridge, orders: str) -> None:
    values = grow(client, orders)
    with client.reader(orders, follow=False) as reader:
        records = list(reader)
    assert by_key(records) == dict.fromkeys(KEYS, values)
    for key in KEYS:
        own = [record for record in records if record.key == key]
        numbers = [record.sn.sequence_id for record in own if record.sn and record.sn.sequence_id is not None]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == len(own)
        dlsns = [record.dlsn for record in own if record.dlsn]
        assert dlsns == sorted(dlsns)
    first = records[0]
    assert (first.stream, first.epoch, first.segment.epoch, first.offset) == (orders, 0, 0, 0)
    assert first.transaction_id is not None
    assert first.local_sequence == KEYS.index(first.key or b"")
    assert first.dlsn == rollbridge.DLSN.of(first.segment, 0, first.local_sequence)
    assert (first.headers, first.committed, first.commit_position) == ([], True, None)
    assert abs(first.timestamp_ms - datetime.now(UTC).timestamp() * 1000) < 600_000


def test_a_reader_goes_on_where_another_one_was_stopped(client: rollbridge.Bridge, orders: str) -> None:
    values = grow(client, orders)
    for read_first in (0, 1, 7, 8, 9, 20, 32):
        with client.reader(orders, follow=False) as reader:
            first = [record for _, record in zip(range(read_first), reader, strict=False)]
            position = reader.position
        assert ReadPosition.parse(str(position)) == position
        with client.reader(orders, start=str(position), follow=False) as reader:
            rest = list(reader)
        assert by_key([*first, *rest]) == dict.fromkeys(KEYS, values)
        assert len(first) + len(rest) == len(values) * len(KEYS)


def test_batches_are_sequences_of_records_with_their_keys_and_values(client: rollbridge.Bridge, orders: str) -> None:
    grow(client, orders)
    with client.reader(orders, follow=False) as reader:
        whole = [record.dlsn for record in reader]
    with client.reader(orders, follow=False) as reader:
        first = next(iter(reader))
        batches = list(reader.batches())
    assert sorted(filter(None, [first.dlsn, *(record.dlsn for batch in batches for record in batch)])) == sorted(
        filter(None, whole)
    )
    batch = batches[0]
    assert (len(batch), batch[0], batch[-1:]) == (len(list(batch)), next(iter(batch)), list(batch)[-1:])
    assert (batch.keys(), batch.values()) == ([r.key for r in batch], [r.value for r in batch])


def test_an_idle_reader_asks_less_and_misses_nothing(
    client: rollbridge.Bridge, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_IDLE_S", 0.0)
    with client.reader(orders, start="latest") as reader:
        assert reader.poll(0.1) is None
        values = grow(client, orders)
        records: list[Record] = []
        while len(records) < len(values) * len(KEYS):
            records += reader.consume(100, 30)
        assert by_key(records) == dict.fromkeys(KEYS, values)
        assert reader.consume(1, 0.5) == []
        assert reader._slice_s == reading._IDLE_POLL_S
        # The library waits for whole milliseconds: of a shorter rest nothing comes but the question, again and again.
        asked: list[float] = []
        fetch = reader._fetch

        def counting(timeout_s: float) -> bool:
            asked.append(timeout_s)
            return fetch(timeout_s)

        monkeypatch.setattr(reader, "_fetch", counting)
        assert reader.consume(1, 0.5) == []
        assert len(asked) <= 5


def test_reading_from_a_dlsn_an_sn_and_a_time(client: rollbridge.Bridge, orders: str) -> None:
    write(client, orders, b"1")
    write(client, orders, b"2")
    with client.reader(orders, follow=False) as reader:
        records = list(reader)
    second = [record for record in records if record.value == b"2"]
    begins = {record.segment: record for record in reversed(second)}
    for places in ([item.dlsn for item in begins.values()], [item.sn for item in begins.values()]):
        with client.reader(orders, start=[place for place in places if place], follow=False) as reader:
            assert by_segment(reader) == by_segment(second)
    one, other = begins.values()
    assert one.dlsn is not None
    with client.reader(orders, start=str(one.dlsn), follow=False) as reader:  # the other segment from its beginning
        assert len(list(reader)) == sum(record.segment == other.segment for record in records) + sum(
            record.segment == one.segment for record in second
        )
    moment = min(record.timestamp_ms for record in second)
    if moment > max(record.timestamp_ms for record in records if record.value == b"1"):
        with client.reader(orders, start=moment, follow=False) as reader:
            assert by_segment(reader) == by_segment(second)
    with client.reader(orders, start=datetime(2100, 1, 1, tzinfo=UTC), follow=False) as reader:
        assert list(reader) == []


@pytest.mark.parametrize("what", ["truncate", "reader", "transactions"])
def test_what_is_written_while_the_place_of_a_time_is_asked_for_is_younger(
    client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between two questions somebody writes, for example between "nothing is younger" and "where does it end"."""
    with client.transaction(ledger) as transaction:
        transaction.write(ledger, key=b"k", value=b"old")
    moment = datetime.now(UTC) + timedelta(seconds=1)
    ask, young = LogOffsets._ask, count()

    def ask_while_others_write(self: LogOffsets, *args: Any) -> dict[str, int]:
        found = ask(self, *args)
        until(lambda: datetime.now(UTC) > moment)  # by then, what is written is younger
        with client.transaction(ledger) as transaction:
            transaction.write(ledger, key=b"k", value=b"young %d" % next(young))
        return found

    monkeypatch.setattr(LogOffsets, "_ask", ask_while_others_write)
    if what == "truncate":
        client.admin.truncate(ledger, moment)
        monkeypatch.undo()
        with client.reader(ledger, follow=False) as reader:
            found = [record.value for record in reader]
    elif what == "reader":
        with client.reader(ledger, start=moment) as reader:
            monkeypatch.undo()
            found = [record.value for record in islice(reader, 2)]
    else:
        with client.transactions(StreamName.parse(ledger).scope, start=moment) as log:
            monkeypatch.undo()
            found = [record.value for item in islice(log, 2) for record in item.records()]
    assert found[:2] == [b"young 0", b"young 1"]


def test_open_transactions_are_previewed_and_those_that_have_ended_are_not(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str
) -> None:
    write(client, orders, b"committed")
    aborted = client.begin(orders)
    aborted.write(orders, key=b"k", value=b"aborted")
    aborted.flush()
    aborted.abort()
    elsewhere = client.begin(payments, orders)  # its ABORT frame is in the buffer of the other stream
    elsewhere.write(orders, key=b"k", value=b"aborted elsewhere")
    elsewhere.flush()
    elsewhere.abort()
    open_one = client.begin(orders)
    open_one.write(orders, key=b"k", value=b"early", headers=[("a", b"b")])
    open_one.flush()
    with client.reader(orders, isolation="read_uncommitted", follow=False) as reader:
        records = list(reader)
    previews = [record for record in records if not record.committed]
    assert [record.value for record in previews] == [b"early"]
    assert [record.value for record in records if record.committed] == [b"committed"] * len(KEYS)
    [preview] = previews
    assert (preview.transaction_id, preview.local_sequence, preview.headers) == (open_one.id, 0, [("a", b"b")])
    assert (preview.offset, preview.dlsn, preview.sn, preview.stream) == (None, None, None, orders)
    with client.reader(orders, isolation="read_uncommitted", start="latest") as reader:
        seen: list[tuple[bytes | None, bool]] = []

        def take(count: int) -> None:
            while len(seen) < count:
                seen.extend((record.value, record.committed) for record in reader.consume(100, 30))

        take(1)
        open_one.write(orders, key=b"k", value=b"late")
        open_one.flush()
        take(2)
        open_one.commit()
        take(4)
        assert seen == [(b"early", False), (b"late", False), (b"early", True), (b"late", True)]


def test_a_loop_over_batches_that_is_left_at_previews_goes_on_with_what_is_committed(
    client: rollbridge.Bridge, orders: str
) -> None:
    write(client, orders, b"committed")
    with client.reader(orders, follow=False) as reader:
        until(lambda: reader._fetch(0.1) and reader._stretch is not None)
        shown = Preview(
            SegmentPlaces(StreamName.parse(orders)),
            rollbridge.SegmentId.of(0, 0),
            rollbridge.TransactionId.of(0, 9),
            0,
            (1, b"", b"", []),
        )
        reader._previews = iter([shown])  # as if both had come at the same time
        assert [record.value for record in next(reader.batches())] == [b""]
        found = [record.value for batch in reader.batches() for record in batch]
    assert found == [b"committed"] * len(KEYS)


def test_what_came_before_an_error_is_handed_out_before_that_is_raised(client: rollbridge.Bridge, ledger: str) -> None:
    write(client, ledger, b"first")
    place = StreamName.parse(ledger).segment_topic(rollbridge.SegmentId.of(0, 0)), 0
    with client.reader(ledger) as reader:
        until(lambda: reader._fetch(0.1))
        reader._arrived.append(FetchError(place, len(KEYS), CorruptDataError("lost"), resume=99))
        found = [record.value for record in reader.consume(100, PATIENCE_S)]
        assert len(found) == len(KEYS)
        assert reader.position.offsets[rollbridge.SegmentId.of(0, 0)] >= len(KEYS)
        with pytest.raises(TruncatedError, match="lost"):
            reader.consume(100, PATIENCE_S)
        write(client, ledger, b"second")
        while len(found) < 2 * len(KEYS):
            found += [record.value for record in reader.consume(100, PATIENCE_S)]
    assert found == [b"first"] * len(KEYS) + [b"second"] * len(KEYS)


def test_a_reader_that_was_closed_says_so(client: rollbridge.Bridge, orders: str) -> None:
    write(client, orders, b"x")
    with client.reader(orders) as reader:
        assert reader.poll(PATIENCE_S) is not None
    position = reader.position
    with pytest.raises(InvalidRequestError, match="was closed"):
        list(reader)  # what has arrived is handed out
    assert by_key(client.reader(orders, start=position, follow=False)).keys() < set(KEYS)


def test_a_start_that_means_nothing_is_refused(client: rollbridge.Bridge, orders: str) -> None:
    starts: list[Any] = ["soon", "", "4-0", "txid=7", "-5", "any", -1, True, [], 1.5, "other/stream@0-0:0", "x@0-0:0"]
    for start in starts:
        with pytest.raises(InvalidRequestError):
            client.reader(orders, start=start)


def test_a_place_that_the_stream_does_not_have_is_refused(client: rollbridge.Bridge, orders: str) -> None:
    write(client, orders, b"x")
    with pytest.raises(InvalidRequestError, match=r"no segment 7\.#epoch\.3"):
        client.reader(orders, start=rollbridge.DLSN(3, 7, 0))
    with pytest.raises(InvalidRequestError, match=r"offset 900 of segment 0\.#epoch\.0 of .* is beyond its end"):
        client.reader(orders, start="0-0:900:0")
    client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.5)])
    with pytest.raises(InvalidRequestError, match="is to be read from a place of its own"):
        client.reader(orders, start=f"{orders}@0-0:0,1-2:0")
    with pytest.raises(StreamNotFoundError):
        client.reader(f"{StreamName.parse(orders).scope}/nothing")
    with pytest.raises(InvalidRequestError, match="isolation"):
        client.reader(orders, isolation="serializable")  # type: ignore[arg-type]


def test_what_was_truncated_can_not_be_begun_at_and_earliest_begins_behind_it(
    site: Site, client: rollbridge.Bridge, scope: str
) -> None:
    stream = f"{scope}/truncated"
    client.admin.create_stream(stream)
    name = StreamName.parse(stream)
    topic = name.segment_topic(rollbridge.SegmentId.of(0, 0))
    produce(site.cluster.bootstrap_servers, topic, [b"0", b"1", b"2", b"3"])
    with client.reader(stream, follow=False) as reader:
        next(iter(reader))
        position = reader.position
    KafkaClient(site.cluster.bootstrap_servers).topics.delete_records({topic: 3})
    for start in (position, "0-0:0:0", rollbridge.SN(rollbridge.DLSN(0, 0, 2))):
        with pytest.raises(TruncatedError, match="begins at offset 3 now") as caught:
            client.reader(stream, start=start)
        assert caught.value.code == "truncated"
    with client.reader(stream, follow=False) as reader:
        assert [record.value for record in reader] == [b"3"]


@pytest.mark.parametrize("name", ["\udcff\udcfe", RECORD_HEADER, TRANSACTION_ID_HEADER, LATE_HEADER])
def test_records_of_strangers_are_read_whatever_their_headers(
    site: Site, client: rollbridge.Bridge, ledger: str, name: str
) -> None:
    topic = StreamName.parse(ledger).segment_topic(SegmentId.of(0, 0))
    with KafkaClient(site.cluster.bootstrap_servers).appender(f"stranger-{ledger}") as stranger:
        stranger.init()
        for _ in range(STRANGERS):  # so many that the interpreter takes its short ways
            stranger.append([(topic, batch_of_one(1, b"k", b"stranger", [(name, b"x")]))])
        stranger.commit()
    with client.transaction(ledger) as txn:
        txn.write(ledger, key=b"k", value=b"own", headers=[("h", b"1")])
    with client.reader(ledger, follow=False) as reader:
        *others, first, second = reader
    assert [(item.key, item.value, item.dlsn is None, item.sn is None) for item in (*others, first, second)] == [
        *[(b"k", b"stranger", False, False)] * STRANGERS,
        (b"k", b"own", False, False),
    ]
    assert (first.transaction_id, first.local_sequence) == (None, None)
    assert (second.transaction_id, second.headers) == (txn.id, [("h", b"1")])
    if name.isascii():
        assert first.headers in ([], [(name, b"x")])
    else:
        with pytest.raises(CorruptDataError, match="can be read without"):
            _ = first.headers
    printed = run_cli(site.environment(), "consume", ledger, "--json")
    assert [json.loads(line)["value"] for line in printed.out.splitlines()] == [*["stranger"] * STRANGERS, "own"]

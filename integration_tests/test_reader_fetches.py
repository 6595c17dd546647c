"""What ``b.reader`` makes of batches as brokers send them: of any codec, larger than a fetch, aborted, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import confluent_kafka
import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S
from rollbridge.base.ids import SegmentId
from rollbridge.kafka.follower import Follower
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import ReadPosition

SEGMENT = SegmentId.of(0, 0)
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def topic_of(stream: str) -> str:
    return StreamName.parse(stream).segment_topic(SEGMENT)


def native(site: Site, transactional: str | None = None, codec: str = "none") -> confluent_kafka.Producer:
    """A producer whose batches hold what is written until it is flushed, up to 50 records."""
    config = {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "linger.ms": 10_000,
        "batch.num.messages": 50,
        "compression.type": codec,
    }
    if transactional is None:
        return confluent_kafka.Producer(config)
    producer = confluent_kafka.Producer({**config, "transactional.id": transactional})
    producer.init_transactions(PATIENCE_S)
    return producer


def write(producer: confluent_kafka.Producer, stream: str, values: Iterable[bytes]) -> None:
    for value in values:
        producer.produce(topic_of(stream), value, partition=0)
    assert producer.flush(PATIENCE_S) == 0


def small_fetches(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    monkeypatch.setitem(Follower.__init__.__kwdefaults__ or {}, "max_bytes", max_bytes)


def values(records: Iterable[rollbridge.Record]) -> list[bytes | None]:
    return [record.value for record in records]


def in_batches(reader: rollbridge.Reader) -> list[bytes | None]:
    return [value for batch in reader.batches() for value in batch.values()]


def at(stream: str, offset: int) -> ReadPosition:
    return ReadPosition(StreamName.parse(stream), {SEGMENT: offset})


@pytest.mark.parametrize("codec", CODECS)
def test_batches_of_any_codec_are_read_from_any_offset(
    site: Site, client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    small_fetches(monkeypatch, 1_000)
    wanted = [b"%d" % number * 20 for number in range(120)]
    write(native(site, codec=codec), ledger, wanted)
    for start in (0, 1, 49, 50, 77, 119, 120):
        with client.reader(ledger, start=at(ledger, start), follow=False) as reader:
            found = list(reader)
        assert values(found) == wanted[start:]
        assert [record.offset for record in found] == list(range(start, len(wanted)))
        with client.reader(ledger, start=at(ledger, start), follow=False) as reader:
            assert in_batches(reader) == wanted[start:]
    # A loop that is left anywhere, and a reader that begins where it was left.
    position: ReadPosition | str = "earliest"
    found = []
    while len(found) < len(wanted):
        with client.reader(ledger, start=position, follow=False) as reader:
            found += islice(reader, 7)
            found += reader.consume(2)
            for batch in reader.batches():
                found += batch
                break
            found += islice(reader, 3)
            position = reader.position
    assert values(found) == wanted


def test_a_batch_larger_than_a_fetch_comes_whole(
    site: Site, client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_fetches(monkeypatch, 100)
    wanted = [bytes([65 + number]) * 300_000 for number in range(4)]
    producer = native(site)
    for value in wanted:
        write(producer, ledger, [value, b"small"])
    with client.reader(ledger, follow=False) as reader:
        assert values(reader) == [item for value in wanted for item in (value, b"small")]


@pytest.mark.parametrize("max_bytes", [300, 1 << 20])
def test_aborted_transactions_longer_than_a_fetch_are_left_out(
    site: Site, client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    small_fetches(monkeypatch, max_bytes)
    lost, kept, plain = native(site, f"lost-{ledger}"), native(site, f"kept-{ledger}"), native(site)
    wanted: list[bytes] = []
    for again in range(3):
        lost.begin_transaction()
        kept.begin_transaction()
        for number in range(6):
            own, others = [b"kept-%d-%d" % (again, number)] * 3, [b"plain-%d-%d" % (again, number)] * 3
            write(lost, ledger, [b"lost" * 10] * 120)
            write(kept, ledger, own)
            write(plain, ledger, others)
            wanted += [*own, *others]
        kept.commit_transaction(PATIENCE_S)
        lost.abort_transaction(PATIENCE_S)
    # What is behind the last record is markers, and aborted.
    lost.begin_transaction()
    write(lost, ledger, [b"lost"] * 120)
    lost.abort_transaction(PATIENCE_S)
    with client.reader(ledger, follow=False) as reader:
        assert values(reader) == wanted
        assert reader.is_finished()
    with client.reader(ledger, follow=False) as reader:
        assert in_batches(reader) == wanted
        position = reader.position
    with client.reader(ledger, start=position, follow=False) as reader:
        assert list(reader) == []
    with client.reader(ledger, follow=False) as reader:
        one_by_one: list[rollbridge.Record] = []
        while not reader.is_finished():
            one_by_one += reader.consume(1, PATIENCE_S)
    assert values(one_by_one) == wanted
    # From within what was aborted, too.
    first = one_by_one[len(wanted) // 3].offset
    assert first is not None
    for start in range(first - 60, first):
        with client.reader(ledger, start=at(ledger, start), follow=False) as reader:
            assert values(islice(reader, 1)) == [one_by_one[len(wanted) // 3].value]


def test_a_reader_that_follows_hands_out_what_comes_in_between_of_all_segments(
    client: rollbridge.Bridge, payments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a fetch has room for one of them only."""
    small_fetches(monkeypatch, 200)
    found: dict[bytes, list[int]] = {}
    keys: Sequence[bytes] = [b"%d" % number for number in range(12)]
    with client.reader(payments) as reader, client.writer(payments) as writer:
        for again in range(5):
            writer.write_all((key, b"%d" % number) for number in range(20 * again, 20 * again + 20) for key in keys)
            writer.flush()
            while sum(map(len, found.values())) < (again + 1) * 20 * len(keys):
                for record in reader.consume(37, PATIENCE_S):
                    found.setdefault(record.key or b"", []).append(int(record.value or b""))
    assert found == {key: list(range(100)) for key in keys}

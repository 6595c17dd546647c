"""A poison corpus: what a broker refuses for good, by every way in; each stops its own transaction or stream only.

After each of them an innocent stream of the same group commits, in the same term of the same leader. The table of ways
and poisons is in ``poison.py``; what can only be forged, and what takes longer, is here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode

from integration_tests import poison
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import run_cli
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.poison import CELLS, IMPOSSIBLE, POISONS, WAYS, Ending, Group
from rollbridge.base.ids import SegmentId
from rollbridge.client import connection
from rollbridge.errors import OutcomeUnknownError, RollbridgeError, TransactionAbortedError
from rollbridge.kafka.records import BatchBuilder, Compression
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import StreamName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CRC_AT, ATTRIBUTES_AT, COUNT_AT, HEADER_BYTES = 17, 21, 57, 61


@pytest.fixture(scope="module")
def shared(site: Site) -> Iterator[Group]:
    with (
        site.connect("tester") as client,
        closing(Group(site, client, f"poison{site.root.replace('/', '-')}")) as group,
    ):
        yield group
        # Plain records of a topic that was removed wait for it to come back, and who closes waits for them.
        with pytest.MonkeyPatch.context() as hurried:
            hurried.setattr(connection, "_CLOSE_S", 1.0)
            client.close()


@pytest.fixture
def group(shared: Group) -> Iterator[Group]:
    shared.fresh()
    yield shared
    shared.innocent_goes_on()


# The table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "name"), [cell for cell in CELLS if cell[0] != "Spark"])
def test_a_poison_harms_nobody_else(group: Group, way: str, name: str) -> None:
    take(group, way, name)


@pytest.mark.parametrize("name", [name for way, name in CELLS if way == "Spark"])
def test_a_poison_by_way_of_spark_harms_nobody_else(spark: SparkSession, group: Group, name: str) -> None:
    group.spark = spark
    take(group, "Spark", name)


def test_every_cell_of_the_table_is_run_or_impossible_for_a_reason() -> None:
    assert {*CELLS, *IMPOSSIBLE} == {(way, name) for way in WAYS for name in POISONS}
    assert not {*CELLS} & {*IMPOSSIBLE}
    assert all(IMPOSSIBLE.values())


def test_a_commit_that_waits_for_an_error_state_is_told_so(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.kafka.topics.delete_topics([group.topic])
    with group.site.connect() as client:
        txn = client.begin(group.poisoned)
        txn.write(group.poisoned, key=b"k", value=b"v")
        txn.commit_async()
        eventually(group.fault, "the stream is in an error state")
        why = f"its leader says: waits for stream {group.poisoned}, which is in an error state"
        with pytest.raises(OutcomeUnknownError, match=f"{why}; it is carried out once that is over"):
            txn.commit(timeout=3)
        assert f"transaction.waits end=commit: {why}" in caplog.text
        eventually(lambda: poison.abort_all(group) and txn._writing.completion.settled, "what waits is aborted")


def take(group: Group, way: str, name: str) -> None:
    """Write a poison by one way, and look what becomes of it."""
    item = POISONS[name]
    ending = item.ending_by(way)
    right = group.kafka.topics.describe([group.topic])[group.topic].config
    if item.settings:
        group.kafka.topics.set_topic_config(group.topic, item.settings)
        await_settings(group, item.settings)
    if item.removes:
        group.kafka.topics.delete_topics([group.topic])
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(WAYS[way], group, item)
        if ending in (Ending.WAITS, Ending.STUCK):
            eventually(group.fault, "the stream is in an error state")
            group.innocent_goes_on()
            assert not future.done()
        if ending is Ending.STAYS:
            group.innocent_goes_on()
            assert group.fault() is None
        if ending in (Ending.WAITS, Ending.STAYS) and item.settings:
            group.kafka.topics.set_topic_config(group.topic, {name: right[name] for name in item.settings})
        if ending is Ending.STUCK:
            eventually(lambda: poison.abort_all(group) and future.done(), "what waits is aborted")
        if ending in (Ending.REFUSED, Ending.STUCK):
            assert future.exception(PATIENCE_S) is not None
        else:
            future.result(PATIENCE_S)
    if ending is Ending.WAITS:
        eventually(lambda: group.fault() is None, "the stream has left its error state")
    elif ending is not Ending.STUCK:
        assert group.fault() is None


def frame(*values: bytes, compression: Compression = Compression.NONE) -> bytearray:
    """A record batch as clients send it."""
    builder = BatchBuilder(1 << 22, compression)
    for value in values:
        builder.append(1, b"k", value)
    return bytearray(builder.build())


def sealed(batch: bytearray) -> bytes:
    """The batch with a right checksum."""
    struct.pack_into(">I", batch, CRC_AT, google_crc32c.value(bytes(batch[ATTRIBUTES_AT:])))
    return bytes(batch)


def wrong_checksum() -> bytes:
    batch = frame(b"x")
    batch[CRC_AT] ^= 1
    return bytes(batch)


def wrong_count() -> bytes:
    batch = frame(b"x", b"y")
    struct.pack_into(">i", batch, COUNT_AT, 1)
    return sealed(batch)


def broken_varint() -> bytes:
    batch = frame(b"x")
    batch[HEADER_BYTES] ^= 0x40
    return sealed(batch)


def cut_short() -> bytes:
    return bytes(frame(b"x" * 100)[:-20])


def with_attributes(bits: int, batch: bytearray | None = None) -> bytes:
    batch = batch or frame(b"x")
    struct.pack_into(">h", batch, ATTRIBUTES_AT, bits)
    return sealed(batch)


def magic_of(number: int) -> bytes:
    batch = frame(b"x")
    batch[16] = number
    return sealed(batch)


def garbage_inside() -> bytes:
    batch = frame(b"x" * 200)
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    return sealed(batch)


def garbage_after_a_large_record() -> bytes:
    """Large enough to be forwarded as it is, so that only the broker looks inside."""
    batch = frame(b"x" * 100_000, b"y" * 100)
    batch[-60:] = b"\xfe" * 60
    return sealed(batch)


def misnumbered() -> bytes:
    """Offset deltas inside that do not count up, in a batch that is forwarded as it is: brokers take it."""
    batch = frame(os.urandom(40_000), b"y")
    # length varint of the first record has three bytes; attributes and a zero timestamp delta follow
    assert batch[HEADER_BYTES + 5] == 0
    batch[HEADER_BYTES + 5] = 2
    return sealed(batch)


ENCODERS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.GZIP: gzip_encode,
    Compression.SNAPPY: snappy_encode,
    Compression.LZ4: lz4_encode,
    Compression.ZSTD: zstd_encode,
}


def recompressed(batch: bytes, codec: Compression) -> bytes:
    """A batch that was made without compression, whatever stands in it, with the codec."""
    whole = bytearray(batch[:HEADER_BYTES]) + ENCODERS[codec](bytes(batch[HEADER_BYTES:]))
    struct.pack_into(">i", whole, 8, len(whole) - 12)
    return with_attributes(int(codec), whole)


def garbage(size: int) -> bytes:
    """Records that are none, behind a header that says nothing of it."""
    batch = frame(os.urandom(size))
    batch[HEADER_BYTES:] = os.urandom(len(batch) - HEADER_BYTES)
    return sealed(batch)


INSIDE: dict[str, Callable[[], bytes]] = {
    f"{what} in {codec.name.lower()}": lambda make=make, codec=codec: recompressed(make(), codec)  # type: ignore[misc]
    for codec in ENCODERS
    for what, make in {
        "garbage": lambda: garbage(200),
        "large garbage": lambda: garbage(50_000),
        "large misnumbered": misnumbered,
    }.items()
}

MALFORMED: dict[str, Callable[[], bytes]] = {
    "wrong checksum": wrong_checksum,
    "wrong count": wrong_count,
    "broken varint": broken_varint,
    "cut short": cut_short,
    "gzip that is none": lambda: with_attributes(1),
    "snappy that is none": lambda: with_attributes(2, frame(b"x" * 50_000)),
    "lz4 that is none": lambda: with_attributes(3),
    "zstd that is none": lambda: with_attributes(4, frame(b"x" * 50_000)),
    "unknown compression": lambda: with_attributes(5),
    "transactional": lambda: with_attributes(0x10),
    "control": lambda: with_attributes(0x20),
    "both": lambda: with_attributes(0x30),
    "stamped by a broker": lambda: with_attributes(0x08),
    "magic 0": lambda: magic_of(0),
    "magic 1": lambda: magic_of(1),
    "magic 3": lambda: magic_of(3),
    "garbage inside": garbage_inside,
    "garbage after a large record": garbage_after_a_large_record,
    "empty": lambda: b"",
    "noise": lambda: bytes(range(256)),
    "large misnumbered": misnumbered,
    **INSIDE,
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_frame_ends_its_own_transaction_only(group: Group, kind: str) -> None:
    bad, good = group.client.begin(group.poisoned), group.client.begin(group.poisoned)
    lost, kept = (txn.write(group.poisoned, key=b"k", value=b"v") for txn in (bad, good))
    bad.flush()
    good.flush()
    count = 2 if "large record" in kind or "misnumbered" in kind else 1
    group.inject_data(bad, MALFORMED[kind](), count)
    group.inject_commit(bad, 1 + count)
    assert good.commit().records == 1
    assert kept.result(PATIENCE_S) is not None
    assert isinstance(lost.exception(PATIENCE_S), TransactionAbortedError)
    assert group.values() == [b"v"]


def test_a_small_frame_that_is_numbered_wrongly_is_numbered_anew(group: Group) -> None:
    """It is joined with others, as all small ones are, so what readers see is right."""
    batch = frame(b"x", b"y")
    assert batch[HEADER_BYTES + 3] == 0
    batch[HEADER_BYTES + 3] = 2
    poison.inject(group, sealed(batch), 2)
    assert group.values() == [b"own", b"x", b"y"]


def test_a_frame_between_the_limits_of_buffer_and_segment_ends_its_transaction(group: Group) -> None:
    txn = group.client.begin(group.poisoned)
    lost = txn.write(group.poisoned, key=b"k", value=b"v")
    txn.flush()
    limits = group.kafka.topics.describe([group.topic, group.buffer])
    segment, buffer = (int(limits[name].config["max.message.bytes"]) for name in (group.topic, group.buffer))
    assert segment < buffer
    group.inject_data(txn, bytes(frame(bytes(segment - 60))), 1)
    group.inject_commit(txn, 2)
    assert isinstance(lost.exception(PATIENCE_S), TransactionAbortedError)
    assert group.fault() is None


def test_the_transactions_of_a_removed_topic_end_with_their_leases(group: Group) -> None:
    group.kafka.topics.delete_topics([group.topic])
    short = group.client.begin(group.poisoned, timeout=timedelta(seconds=3))
    short.write(group.poisoned, key=b"k", value=b"v")
    long = group.client.begin(group.poisoned)
    long.write(group.poisoned, key=b"k", value=b"v")
    futures = [short.commit_async(), long.commit_async()]
    eventually(group.fault, "the stream is in an error state")
    group.innocent_goes_on()
    with pytest.raises(TransactionAbortedError, match="error state"):
        futures[0].result(PATIENCE_S)
    answer = run_cli(group.site.environment(), "stream", "describe", group.poisoned)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in answer.out
    assert "stream-error" in run_cli(group.site.environment(), "doctor").out
    eventually(lambda: str(long.id) in run_cli(group.site.environment(), "txn", "list").out, "it is listed")
    answer = run_cli(group.site.environment(), "txn", "abort", str(long.id))
    assert answer.code == 0, answer
    with pytest.raises(TransactionAbortedError, match="error state"):
        futures[1].result(PATIENCE_S)


# Rolling commits ----------------------------------------------------------------------------------------------------


def split(group: Group) -> None:
    """Scale the poisoned stream, so that what began before needs a rolling commit."""
    group.client.admin.scale(group.poisoned, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])


def test_a_rolling_commit_that_is_refused_waits_and_others_go_on(group: Group) -> None:
    """Kafka has a topic of the name that it needs, and that is another one; it is taken away later."""
    txn = group.client.begin(group.poisoned)
    txn.write(group.poisoned, key=b"k", value=b"rolled")
    txn.flush()
    split(group)
    needed = StreamName.parse(group.poisoned).segment_topic(SegmentId.of(0, 2))
    group.kafka.topics.create_topics([TopicSpec(name=needed, partitions=2)])
    future = txn.commit_async()
    eventually(group.fault, "the stream is in an error state")
    group.innocent_goes_on()
    assert not future.done()
    assert group.values() == []
    group.kafka.topics.delete_topics([needed])
    assert future.result(PATIENCE_S).records == 1
    eventually(lambda: group.fault() is None, "the stream has left its error state")
    assert group.values() == [b"rolled"]


def test_a_rolling_commit_with_a_malformed_frame_ends_its_own_transaction_only(group: Group) -> None:
    bad, good = group.client.begin(group.poisoned), group.client.begin(group.poisoned)
    lost, kept = (txn.write(group.poisoned, key=b"k", value=b"v") for txn in (bad, good))
    bad.flush()
    good.flush()
    split(group)
    group.inject_data(bad, MALFORMED["garbage in zstd"](), 1)
    group.inject_commit(bad, 2)
    assert good.commit().records == 1
    assert kept.result(PATIENCE_S) is not None
    assert isinstance(lost.exception(PATIENCE_S), TransactionAbortedError)
    assert group.values() == [b"v"]


# Old segments -------------------------------------------------------------------------------------------------------


def test_old_segments_take_every_time_after_a_takeover(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    with (
        Site(cluster, f"/{unique_name('old-segments')}", tmp_path) as site,
        site.connect() as client,
        closing(Group(site, client, unique_name("old"))) as group,
    ):
        limit = {"message.timestamp.after.max.ms": "3600000"}  # Kafka's own, which older versions left as it is
        group.kafka.topics.set_topic_config(group.topic, limit)
        await_settings(group, limit)

        def is_taken() -> bool:
            try:
                poison.by_plain_writer(group, POISONS["time of two hours ahead"])
            except RollbridgeError:
                return False
            return True

        assert not is_taken()
        site.stop_coordinator()
        site.start_coordinator()
        eventually(is_taken, "the next leader has put it right")


def await_settings(group: Group, settings: Mapping[str, str]) -> None:
    """Return when the broker has heard of new settings of the topic."""

    def known() -> bool:
        config = group.kafka.topics.describe([group.topic])[group.topic].config
        return all(config.get(name) == value for name, value in settings.items())

    eventually(known, f"{settings} of {group.topic}")

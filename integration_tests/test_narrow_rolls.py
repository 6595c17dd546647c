"""Late commits on real servers: they touch what was written to and has changed since, and nothing else."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import cast

import pytest

import rollbridge
from integration_tests.clients import Site, until
from rollbridge.base.ids import SegmentId
from rollbridge.errors import TransactionRefusedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.epochs import EpochCause, EpochHistory, check_chain
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import parse_segment_topic

KEYS = [b"key-%d" % number for number in range(400)]


def keys_in(history: EpochHistory, number: int, count: int = 3) -> list[bytes]:
    """Keys that a segment of the first epoch holds, by its number."""
    held = history.records[0].segment_numbered(number).range
    return [key for key in KEYS if KeySpace().position(key) in held][:count]


def halves(history: EpochHistory, number: int) -> list[tuple[float, float]]:
    """The two halves of an active segment."""
    held = history.active.segment_numbered(number).range
    middle = (held.low + held.high) / 2
    return [(held.low, middle), (middle, held.high)]


def topics_of(site: Site, stream: str) -> set[str]:
    """The topics of a stream's segments."""
    prefix = f"{stream.replace('/', '.')}.segment-"
    return {
        name for name in KafkaClient(site.cluster.bootstrap_servers).topics.list_topics() if name.startswith(prefix)
    }


def by_key(site: Site, stream: str) -> dict[bytes, list[bytes]]:
    """What a plain consumer finds, in the order of each key's lineage."""
    found: dict[bytes, list[tuple[tuple[int, int], bytes]]] = defaultdict(list)
    for message in site.committed(stream):
        key, value = cast("tuple[bytes, bytes]", (message.key(), message.value()))
        _, segment = parse_segment_topic(message.topic() or "")
        found[key].append(((segment.epoch, message.offset() or 0), value))
    return {key: [value for _, value in sorted(rows)] for key, rows in found.items()}


@pytest.fixture
def wide(client: rollbridge.Bridge, orders: str) -> str:
    """A stream of 64 segments."""
    name = f"{orders}-wide"
    client.admin.create_stream(name, segments=64)
    return name


def test_a_late_commit_of_one_record_makes_three_topics_and_nobody_else_notices(
    site: Site, client: rollbridge.Bridge, wide: str
) -> None:
    history = client.admin.history(wide)
    (late_key,), (other_key,) = keys_in(history, 5, 1), keys_in(history, 40, 1)
    late = client.begin(wide)
    late.write(wide, key=late_key, value=b"late")
    late.flush()
    client.admin.scale(wide, seal=[5], ranges=halves(history, 5))
    before = topics_of(site, wide)
    written: list[bytes] = []
    seen: list[bytes] = []
    ends = threading.Event()

    def read() -> None:
        with client.reader(wide) as reader:
            while not ends.is_set() or len(seen) < len(written):
                seen.extend(record.value or b"" for record in reader.consume(100, 0.2) if record.key == other_key)

    reading = threading.Thread(target=read)
    reading.start()
    with client.writer(wide) as writer:

        def write(value: bytes) -> SegmentId:
            written.append(value)
            dlsn = writer.write(key=other_key, value=value).result(60).dlsn
            assert dlsn is not None
            return dlsn.segment

        used = {write(b"before-%d" % number) for number in range(5)}
        late.commit()
        used |= {write(b"after-%d" % number) for number in range(5)}
    ends.set()
    reading.join()
    assert seen == written
    assert used == {history.active.segment_numbered(40).id}, "the topic is the same"
    assert len(topics_of(site, wide) - before) == 3
    grown = client.admin.history(wide)
    assert check_chain(grown.records) == []
    assert [record.cause for record in grown.records[-2:]] == [
        EpochCause.ROLLING_TRANSACTIONS,
        EpochCause.ROLLING_ACTIVE,
    ]
    assert [str(item.id) for item in grown.began_with(2)] == ["5.#epoch.2"]
    assert [str(item.id) for item in grown.began_with(3)] == ["64.#epoch.3", "65.#epoch.3"]
    assert {item.id for item in history.active.segments if item.id.number != 5} <= grown.active.segment_ids


def test_what_an_old_transaction_wrote_elsewhere_goes_into_the_active_segments_with_the_rest_or_alone(
    site: Site, client: rollbridge.Bridge, wide: str
) -> None:
    history = client.admin.history(wide)
    both, alone = client.begin(wide), client.begin(wide)
    rolled, kept = keys_in(history, 5), keys_in(history, 6)
    for key in (*rolled, *kept):
        both.write(wide, key=key, value=b"both")
    for key in kept:
        alone.write(wide, key=key, value=b"alone")
    client.admin.scale(wide, seal=[5], ranges=halves(history, 5))
    with client.transaction(wide) as txn:
        for key in (*rolled, *kept):
            txn.write(wide, key=key, value=b"between")
    alone.commit()
    assert len(client.admin.history(wide).records) == 2, "no roll"
    both.commit()
    grown = client.admin.history(wide)
    assert len(grown.records) == 4
    assert by_key(site, wide) == {key: [b"between", b"both"] for key in rolled} | {
        key: [b"between", b"alone", b"both"] for key in kept
    }
    with client.reader(wide, follow=False) as reader:
        values: dict[bytes, list[bytes]] = defaultdict(list)
        for record in reader:
            values[record.key or b""].append(record.value or b"")
    assert values == by_key(site, wide)


def test_late_commits_one_after_another_share_their_epochs(site: Site, client: rollbridge.Bridge, wide: str) -> None:
    history = client.admin.history(wide)
    keys = keys_in(history, 5)
    late = [client.begin(wide) for _ in range(20)]
    for place, txn in enumerate(late):
        for key in keys:
            txn.write(wide, key=key, value=b"%d" % place)
    client.admin.scale(wide, seal=[5], ranges=halves(history, 5))
    for txn in late:
        txn.commit()
    until(lambda: not client.admin.history(wide).unsealed())
    grown = client.admin.history(wide)
    assert check_chain(grown.records) == []
    assert len(grown.records) < 2 + 2 * len(late), "each has two of its own"
    assert by_key(site, wide) == {key: [b"%d" % place for place in range(20)] for key in keys}


def test_what_was_written_after_an_answer_stays_behind_it_whatever_comes_late(
    site: Site, client: rollbridge.Bridge, wide: str
) -> None:
    """Plain and conditional writes between late commits, to the same keys, each after the answer before."""
    history = client.admin.history(wide)
    keys = keys_in(history, 5, 2)
    late = [client.begin(wide) for _ in range(8)]
    for place, txn in enumerate(late):
        for key in keys:
            txn.write(wide, key=key, value=b"late-%d" % place)
        txn.flush()
    client.admin.scale(wide, seal=[5], ranges=halves(history, 5))
    expected: list[bytes] = []
    with client.writer(wide) as writer:
        for place, txn in enumerate(late):
            txn.commit()
            expected.append(b"late-%d" % place)
            if place % 3 == 1:
                for key in keys:
                    writer.write(key=key, value=b"plain-%d" % place).result(60)
                expected.append(b"plain-%d" % place)
            if place % 3 == 2:
                with client.transaction(wide) as now:
                    for key in keys:
                        now.write(wide, key=key, value=b"now-%d" % place)
                expected.append(b"now-%d" % place)
    until(lambda: not client.admin.history(wide).unsealed())
    assert by_key(site, wide) == dict.fromkeys(keys, expected)


def test_conditions_of_late_commits_are_about_segments_that_are_rolled_and_others(
    site: Site, client: rollbridge.Bridge, wide: str
) -> None:
    history = client.admin.history(wide)
    (rolled,), (kept,) = keys_in(history, 5, 1), keys_in(history, 6, 1)
    with client.transaction(wide) as txn:
        first = {key: txn.write(wide, key=key, value=b"first") for key in (rolled, kept)}
    places = {key: future.result() for key, future in first.items()}
    begun = [client.begin(wide) for _ in range(4)]
    for place, txn in enumerate(begun):
        for key in (rolled, kept):
            txn.write(wide, key=key, value=b"late-%d" % place)
    for key in (rolled, kept):
        begun[0].expect(wide, key=key, sn=places[key], scope="key")
    begun[1].expect(wide, key=kept, sn=places[kept], scope="key")
    begun[2].expect(wide, key=rolled, sn=places[rolled], scope="key")
    client.admin.scale(wide, seal=[5], ranges=halves(history, 5))
    begun[0].commit()
    for txn in begun[1:3]:
        with pytest.raises(TransactionRefusedError):
            txn.commit()
    begun[3].commit()
    with client.cas_writer(wide) as writer:
        for key in (rolled, kept):
            writer.write(key, b"last", expected=writer.tail(key))
    until(lambda: not client.admin.history(wide).unsealed())
    expected = [b"first", b"late-0", b"late-3", b"last"]
    assert by_key(site, wide) == {rolled: expected, kept: expected}

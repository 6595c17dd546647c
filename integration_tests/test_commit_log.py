"""The commit log is truncated on a real cluster: who reads it, who is waited for, and what is known afterwards."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, patient_client, read_committed
from integration_tests.command_line import Cli
from integration_tests.coordinators import Relay
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind
from rollbridge.buffer.snapshot_topic import read_all
from rollbridge.cli.common import ExitCode
from rollbridge.commitlog.control import ControlKind, decode_control
from rollbridge.commitlog.outcomes import ended_key
from rollbridge.errors import (
    InvalidRequestError,
    NotFoundError,
    TransactionAbortedError,
    TransactionCommittedError,
    TruncatedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName, snapshot_indexes_topic

SETTINGS = {
    "CONSTANT_RETENTION_CHECK_MS": "100",
    "CONSTANT_TRUNCATE_BUFFERS_MS": "100",
    "CONSTANT_BOOKKEEPING_MS": "200",
    "CONSTANT_OUTCOMES_AGAIN": "10",
    "CONSTANT_OUTCOMES_UNLISTED_MAX": "20",
    "CONSTANT_EPOCHS_KEEP_MS": "1000",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": "10",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "200",
}
SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A rollbridge whose coordinator does its housekeeping all the time."""
    root = f"/commit-log-{time.monotonic_ns()}"
    with Site(cluster, root, tmp_path_factory.mktemp("coordinators"), **SETTINGS) as site:
        yield site


@pytest.fixture(scope="module")
def kafka(cluster: AnyCluster) -> KafkaClient:
    return KafkaClient(cluster.bootstrap_servers)


def log_of(stream: str) -> str:
    return GroupName(StreamName.parse(stream).scope).commit_log_topic


def group_of(stream: str) -> str:
    return StreamName.parse(stream).scope


def commit(client: rollbridge.Bridge, stream: str, count: int) -> list[TransactionId]:
    """Commit so many transactions of one record."""
    ids = []
    for number in range(count):
        with client.transaction(stream) as txn:
            txn.write(stream, key=b"k", value=b"%d" % number)
        ids.append(txn.id)
    return ids


def say_again(cluster: AnyCluster, stream: str, identifier: TransactionId) -> None:
    """A BEGIN frame of a transaction arrives once more, long after."""
    begin = BeginFrame("tester", 0, None, 1_000, {stream: 0})
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all"})
    producer.produce(
        StreamName.parse(stream).buffer_topic(),
        key=FrameHeader(FrameKind.BEGIN, identifier.bytes).pack(),
        value=begin.encode(),
        partition=0,
    )
    assert producer.flush(PATIENCE_S) == 0


def outcomes(cluster: AnyCluster, stream: str) -> Counter[TransactionId]:
    """How many outcomes each transaction has in what is left of the log."""
    records = (
        decode_control(item.key(), item.value()) for item in read_committed(cluster.bootstrap_servers, [log_of(stream)])
    )
    return Counter(record.transaction for record in records if record.kind is not ControlKind.BEGIN)


def test_what_is_older_than_the_retention_goes_and_what_has_ended_stays_known(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    log, scope = log_of(ledger), group_of(ledger)
    with client.transactions(scope, follow=False) as reader:
        begin = reader.position
    still_open = client.begin(ledger)
    still_open.write(ledger, key=b"k", value=b"open all the time")
    still_open.flush()
    old = commit(client, ledger, 50)
    client.admin.update_group(scope, retention_time=SECOND)

    with site.connect("another") as other:

        def start() -> int:
            commit(other, ledger, 1)  # marks are noted where the log has grown
            return kafka.offsets.first([log])[log]

        eventually(lambda: start() > 60, "the commit log is truncated")
    client.admin.update_group(scope, retention_time=None)  # or it would be cut while it is read below
    with pytest.raises(TruncatedError, match="begins at"):
        client.transactions(scope, start=begin)
    with client.transactions(scope, follow=False) as reader:
        assert [item.id for item in reader if item.id in old] == []
    whole = list(read_all(KafkaClient(site.cluster.bootstrap_servers), log))
    assert whole[0].offset > 60, "a repair reads what is left of the log"
    assert client.outcome(old[-1]).state == "committed", "outcomes are remembered elsewhere"
    say_again(site.cluster, ledger, old[0])
    commit(client, ledger, 1)
    site.stop_coordinator()
    say_again(site.cluster, ledger, old[1])
    site.start_coordinator()
    say_again(site.cluster, ledger, old[2])
    time_out = commit(client, ledger, 1)
    still_open.commit()
    found = outcomes(site.cluster, ledger)
    assert {found[item] for item in old[:3]} == {0}, "nothing of them has ended a second time"
    assert found[time_out[0]] == found[still_open.id] == 1
    committed = [item.value() for item in site.committed(ledger)]
    assert committed.count(b"open all the time") == 1


def test_a_group_that_reads_the_log_is_waited_for(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient, unique_name: Callable[[str], str]
) -> None:
    log, scope, audit = log_of(ledger), group_of(ledger), unique_name("audit")
    cli = Cli(site.cluster, site.root)
    changed = cli.json("group", "update", scope, "--retention-time", "1s", "--retention-group", audit)
    assert changed["retention"] == {"time_ms": 1_000, "bytes": None, "groups": [audit]}
    commit(client, ledger, 20)
    end = kafka.offsets.end([log])[log]
    before = client.admin.group(scope)
    assert before.retention is not None

    def marks() -> int:
        commit(client, ledger, 1)
        with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
            node = session.get(paths.log_marks(GroupName(scope)))
        return 0 if node is None else node.value.count(b'"ms"')

    eventually(lambda: marks() > 3, "the log has grown older")
    assert kafka.offsets.first([log])[log] == 0
    consumer = Consumer({"bootstrap.servers": site.cluster.bootstrap_servers, "group.id": audit})
    consumer.commit(offsets=[TopicPartition(log, 0, end - 3)], asynchronous=False)
    consumer.close()

    def start() -> int:
        commit(client, ledger, 1)
        return kafka.offsets.first([log])[log]

    eventually(lambda: start() == end - 3, "it has read up to there")
    assert cli("group", "list").out.count(f"waits for 1 group: {audit}") == 1
    kept = cli.json("group", "update", scope, "--default")
    assert kept["retention"] is None
    assert cli("group", "update", scope).code == ExitCode.USAGE
    assert cli("group", "update", scope, "--default", "--retention-time", "1d").code == ExitCode.USAGE


def test_what_makes_no_sense_is_refused(client: rollbridge.Bridge, ledger: str) -> None:
    scope = group_of(ledger)
    with pytest.raises(InvalidRequestError):
        client.admin.update_group(scope, retention_bytes=0)
    with pytest.raises(InvalidRequestError, match="not both"):
        client.admin.update_group(scope, retention_bytes=1, default=True)
    with pytest.raises(NotFoundError):
        client.admin.update_group(f"{scope}/nobody", default=True)
    assert client.admin.group(scope).retention is None
    assert scope in [item.name.scope for item in client.admin.groups()]


def test_a_new_leader_without_the_list_reads_it_from_the_log(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    log, scope = log_of(ledger), group_of(ledger)
    client.admin.update_group(scope, retention_time=SECOND)
    old = commit(client, ledger, 30)
    still_open = client.begin(ledger)
    still_open.write(ledger, key=b"k", value=b"kept")
    still_open.flush()

    def start() -> int:
        commit(client, ledger, 1)
        return kafka.offsets.first([log])[log]

    eventually(lambda: start() > 40, "the commit log is truncated")
    site.stop_coordinator()
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "acks": "all"})
    producer.produce(snapshot_indexes_topic(scope), key=ended_key(GroupName(scope)), value=b"\x01nonsense")
    assert producer.flush(PATIENCE_S) == 0
    site.start_coordinator()
    client.admin.update_group(scope, default=True)  # what comes now is to be there when it is looked at
    say_again(site.cluster, ledger, old[0])
    fresh = commit(client, ledger, 3)
    still_open.commit()
    found = outcomes(site.cluster, ledger)
    assert found[still_open.id] == 1, "it was recorded as open before the log was cut"
    assert {found[item] for item in fresh} == {1}


def test_who_has_missed_outcomes_that_are_truncated_asks_the_leader(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    log, scope = log_of(ledger), group_of(ledger)
    with site.connect("absent") as absent:
        kinds = ("committed", "aborted", "open")
        begun = {kind: absent.begin(ledger) for kind in kinds}
        futures = {kind: txn.write(ledger, key=b"k", value=kind.encode()) for kind, txn in begun.items()}
        for txn in begun.values():
            txn.flush()
        eventually(lambda: len(client.admin.transactions(GroupName(scope))) == len(begun), "all have records")
        follower = absent._outcomes._follower
        follower.leave((log, 0))  # as if it stood still
        missed = kafka.offsets.end([log])[log]
        asked = begun["committed"].commit_async()
        client.admin.abort_transaction(begun["aborted"].id, group=GroupName(scope))
        eventually(lambda: client.outcome(begun["committed"].id).state == "committed", "it is committed")
        client.admin.update_group(scope, retention_time=SECOND)
        end = kafka.offsets.end([log])[log]

        def start() -> int:
            commit(client, ledger, 1)
            return kafka.offsets.first([log])[log]

        eventually(lambda: start() > end, "the outcomes are truncated")
        assert not asked.done()
        follower.follow((log, 0), missed)
        result = asked.result(PATIENCE_S)
        assert result.records == 1
        assert result.position == client.outcome(begun["committed"].id).position
        with pytest.raises(TransactionCommittedError):
            futures["committed"].result(PATIENCE_S)  # where it stands is not remembered
        with pytest.raises(TransactionAbortedError):
            futures["aborted"].result(PATIENCE_S)
        eventually(lambda: not absent._outcomes.missed, "the leader has told of the open one, too")
        assert not futures["open"].done()
        # What is decided now is still there when it is looked up.
        client.admin.update_group(scope, retention_time=timedelta(days=1))
        begun["open"].commit()
        assert futures["open"].result(PATIENCE_S) is not None


def previewed(client: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    """The values that a preview shows, which ends when it has read everything."""
    with client.reader(stream, start="latest", isolation="read_uncommitted", follow=False) as reader:
        return [record.value for record in reader if not record.committed]


def test_a_preview_shows_nothing_that_has_ended_although_the_log_does_not_say_so_any_more(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    log, scope, buffer = log_of(ledger), group_of(ledger), StreamName.parse(ledger).buffer_topic()
    still_open = client.begin(ledger)
    still_open.write(ledger, key=b"k", value=b"open")
    still_open.flush()
    commit(client, ledger, 5)
    client.admin.update_group(scope, retention_time=SECOND)
    old = kafka.offsets.end([log])[log]
    with site.connect("another") as other:

        def start() -> int:
            commit(other, ledger, 1)
            return kafka.offsets.first([log])[log]

        eventually(lambda: start() > old, "the commit log is truncated")
        assert kafka.offsets.first([buffer])[buffer] == 0, "frames of what has ended are still there"
        assert previewed(client, ledger) == [b"open"]
        site.stop_coordinator()
        indexes = snapshot_indexes_topic(scope)
        producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "acks": "all"})
        listed = ended_key(GroupName(scope))
        for key in {item.key() for item in read_committed(site.cluster.bootstrap_servers, [indexes])} - {listed}:
            producer.produce(indexes, key=key, value=None)
        assert producer.flush(PATIENCE_S) == 0
        assert previewed(client, ledger) == [b"open"], "without snapshots all of the buffer is read"
        producer.produce(indexes, key=listed, value=None)
        assert producer.flush(PATIENCE_S) == 0
        with pytest.raises(TruncatedError, match="Read on these topics"):
            previewed(client, ledger)
        site.start_coordinator()
        still_open.commit()
        assert previewed(client, ledger) == []


def test_many_weeks_leave_what_one_does(site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient) -> None:
    """With weeks of a second: topics, nodes, and what a new leader has to read, while a stream is scaled and rolled."""
    scope, buffer = group_of(ledger), StreamName.parse(ledger).buffer_topic()
    log, indexes = log_of(ledger), snapshot_indexes_topic(group_of(ledger))
    client.admin.update_group(scope, retention_time=SECOND)
    client.admin.update_stream(ledger, retention_time=SECOND)

    def week() -> dict[str, int]:
        late = client.begin(ledger)
        late.write(ledger, key=b"late", value=b"late")
        late.flush()
        commit(client, ledger, 10)
        client.admin.scale(
            ledger, seal=[client.admin.describe(ledger).active.segments[0].id.number], ranges=[(0.0, 1.0)]
        )
        commit(client, ledger, 10)
        late.commit()
        starts, ends = (look([log, buffer]) for look in (kafka.offsets.first, kafka.offsets.end))
        with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
            nodes = list(_nodes(session, "/"))
        return {
            "topics": sum(name.startswith(f"{scope}.") for name in kafka.topics.list_topics()),
            "nodes": len(nodes),
            "bytes": sum(nodes),
            "to be read at a takeover": sum(ends[name] - starts[name] for name in (log, buffer)),
            "epochs": len(client.admin.history(ledger).records),
            "keys": len({item.key() for item in read_committed(site.cluster.bootstrap_servers, [indexes])}),
        }

    seen = [week() for _ in range(40)]
    for what in seen[0]:
        before, last = max(item[what] for item in seen[8:20]), min(item[what] for item in seen[-10:])
        assert last <= before, f"{what} grow: {[item[what] for item in seen]}"
    assert kafka.offsets.first([log])[log] > 200
    assert client.admin.history(ledger).first > 40


def _nodes(session: ZooKeeperSession, path: str) -> Iterator[int]:
    node = session.get(path)
    if node is not None:
        yield len(re.sub(rb"\d+", b"0", node.value))  # a number that counts up has another digit now and then
    for name in session.children(path):
        yield from _nodes(session, f"{path.rstrip('/')}/{name}")


POINTS = [
    "write_ended/AppendMessages:after",
    "write_ended/CommitRound:after",
    "_save_marks/Write:before",
    "_save_marks/Write:after",
    "_delete_below/DeleteRecords:before",
    "_delete_below/DeleteRecords:after",
    "update_group/Write:after",
    "record_extended/Write:before",
    "record_extended/Write:after",
]


@pytest.mark.parametrize("point", POINTS)
def test_the_next_leader_knows_what_has_ended_wherever_the_one_that_truncates_dies(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, kafka: KafkaClient, point: str
) -> None:
    scope = unique_name("cut-off")
    stream, root = f"{scope}/ledger", f"/{scope}"
    with Relay(cluster, root, tmp_path, [point], SETTINGS) as relay, patient_client(cluster, root, "teller") as client:
        client.admin.create_stream(stream)
        still_open = client.begin(stream, timeout=timedelta(minutes=5))
        still_open.write(stream, key=b"k", value=b"open all the time")
        still_open.flush()
        old = commit(client, stream, 30)
        eventually(lambda: client.admin.transactions(GroupName(scope)), "the open one has a record")
        still_open.extend(timedelta(hours=1))
        client.admin.update_group(scope, retention_time=SECOND)

        def is_truncated() -> bool:
            commit(client, stream, 1)
            return kafka.offsets.first([log_of(stream)])[log_of(stream)] > 40

        eventually(is_truncated, "the commit log is truncated")
        eventually(lambda: commit(client, stream, 1) and relay.deaths == 1, f"a leader dies at {point}")
        client.admin.update_group(scope, retention_time=None)
        for identifier in old[:3]:
            say_again(cluster, stream, identifier)
        last = commit(client, stream, 1)
        still_open.commit()
        found = outcomes(cluster, stream)
        assert {found[item] for item in old[:3]} == {0}, "nothing of them has ended a second time"
        assert found[last[0]] == found[still_open.id] == 1
        with client.reader(stream, follow=False) as reader:
            assert [record.value for record in reader].count(b"open all the time") == 1

"""``rollbridge verify`` on a real stream: nothing is found where all is well, and every mutant put in by hand is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, header_of, read_committed, truncate_all, until
from integration_tests.command_line import Cli
from integration_tests.kafka_tools import create_topic
from rollbridge.base.attribution import RECORD_HEADER, pack_run
from rollbridge.base.ids import SegmentId, TransactionId, local_sequence
from rollbridge.buffer.frames import unpack_header
from rollbridge.cli.common import ExitCode
from rollbridge.commitlog.control import ControlKind, ControlRecord, Run
from rollbridge.doctor.verify import StreamVerification, verify
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import GroupName

FIRST = SegmentId.from_int(0)
UNKNOWN = TransactionId.of(0, 1 << 60)


@dataclass
class Scene:
    """A stream of its own on a site whose coordinator may be stopped."""

    site: Site
    client: rollbridge.Bridge
    cli: Cli
    stream: str

    @property
    def topic(self) -> str:
        """Where the first segment lies."""
        return self.client.admin.places(self.stream).of(FIRST)[0]

    @property
    def log(self) -> str:
        """The commit log."""
        return GroupName(self.stream.split("/")[0]).commit_log_topic

    def verify(self, code: int = ExitCode.OK) -> dict[str, Any]:
        """What the command says."""
        answer = self.cli("verify", self.stream, "--json")
        assert answer.code == code, answer
        found: dict[str, Any] = json.loads(answer.out)
        return found

    def verify_while(self, meanwhile: Callable[[], object], reading: str | None = None) -> StreamVerification:
        """What is found if something happens before anything is read, or behind the first that is read of a kind."""
        settings, admin = self.client.settings, self.client.admin
        config, history = admin.describe(self.stream).config, admin.history(self.stream)
        told: list[str] = []

        def tell(what: str, offsets: int) -> None:
            if what == reading and offsets and what not in told:
                told.append(what)
                meanwhile()

        def planned(_: object) -> None:
            if reading is None:
                meanwhile()

        found = verify(KafkaClient.of(settings), config, history, planned=planned, tell=tell)
        assert told == ([] if reading is None else [reading])
        return found

    def kinds(self) -> dict[str, int]:
        """The kinds of what is found."""
        counts: dict[str, int] = self.verify(ExitCode.UNEXPECTED)["counts"]
        return counts

    def put(
        self, topic: str, key: bytes | None, value: bytes, header: bytes | None = None, *, partition: int = 0
    ) -> int:
        """Write a message by hand; return its offset."""
        offsets: list[int | None] = []
        producer = Producer({"bootstrap.servers": self.site.cluster.bootstrap_servers})
        headers: list[tuple[str, str | bytes | None]] = [] if header is None else [(RECORD_HEADER, header)]
        producer.produce(
            topic,
            key=key,
            value=value,
            partition=partition,
            headers=headers,
            on_delivery=lambda fault, message: offsets.append(message.offset()),
        )
        assert producer.flush(60) == 0
        [offset] = offsets
        assert offset is not None
        return offset

    def first_frame_again(self, transaction: TransactionId) -> tuple[tuple[str, int], int]:
        """Put the first message of a transaction into its buffer once more, as who sends it again; return where."""
        config = self.client.admin.describe(self.stream).config
        servers, topic = self.site.cluster.bootstrap_servers, config.buffer_topic
        for message in read_committed(
            servers, [topic], isolation="read_uncommitted", partitions=config.buffer_partitions
        ):
            header = unpack_header(message.key())
            if header is not None and header.transaction == transaction.bytes:
                place = topic, message.partition() or 0
                return place, self.put(topic, message.key(), message.value() or b"", partition=place[1])
        raise AssertionError(f"nothing of {transaction} is in {topic}")

    def forge_commit(
        self,
        transaction: TransactionId,
        runs: Sequence[Run],
        begun_ms: int = 0,
        *,
        segment: SegmentId = FIRST,
        records: int | None = None,
    ) -> None:
        """Put a COMMIT record on the log."""
        count = sum(run.count for run in runs) if records is None else records
        record = ControlRecord(
            transaction,
            ControlKind.COMMIT,
            "forger",
            begun_ms,
            begun_ms,
            1,
            records=count,
            placement={self.stream: {segment: runs}},
        )
        self.put(self.log, transaction.bytes, record.encode_value())


@pytest.fixture
def scene(cluster: AnyCluster, scope: str, tmp_path: Path) -> Iterator[Scene]:
    """A stream with two transactions, plain and conditional records, and an aborted transaction."""
    root, stream = f"/{scope}", f"{scope}/orders"
    with Site(cluster, root, tmp_path) as site, site.connect("writer") as client:
        client.admin.create_stream(stream)
        for number in range(2):
            with client.transaction(stream) as txn:
                for place in range(20):
                    txn.write(stream, key=b"%d" % place, value=b"%d-%d" % (number, place))
        with client.writer(stream) as plain:
            for place in range(7):
                plain.write(b"%d" % place, b"plain")
            plain.flush()
        aborted = client.begin(stream)
        aborted.write(stream, key=b"x", value=b"gone")
        aborted.abort()
        yield Scene(site, client, Cli(cluster, root), stream)


def test_a_stream_that_has_seen_everything_is_as_the_log_says(scene: Scene) -> None:
    stream, client = scene.stream, scene.client
    with client.cas_writer(stream) as conditional:
        conditional.write(b"k", b"v", expected=rollbridge.ANY)
    late = client.begin(stream)
    for place in range(500):
        late.write(stream, key=b"late-%d" % place, value=b"x" * 100)
    client.admin.scale(stream, seal=[0], ranges=[(0.0, 0.25), (0.25, 1.0)])
    with client.transaction(stream) as after:
        for place in range(30):
            after.write(stream, key=b"after-%d" % place, value=b"y")
    assert late.commit().records == 500
    found = scene.verify()
    assert found["findings"] == []
    assert (found["transactions"], found["compared_with_buffers"]) == (4, 4)
    assert found["segments"] >= 3
    records = found["records"]
    assert (records["matched"], records["plain"], records["conditional"]) == (570, 7, 1)
    assert (records["forgotten"], records["deleted"], records["elsewhere"]) == (0, 0, 0)
    assert "are where the commit log says, once" in scene.cli("verify", stream).out


def test_records_that_no_commit_names_are_found(scene: Scene) -> None:
    scene.put(scene.topic, b"k", b"by hand", pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b""))
    found = scene.verify(ExitCode.UNEXPECTED)
    assert found["counts"] == {"foreign": 1}
    assert str(UNKNOWN) in found["findings"][0]["text"]
    assert found["records"]["matched"] == 40


def test_a_record_that_stands_twice_is_found(scene: Scene) -> None:
    [first] = [message for message in scene.site.committed(scene.stream) if message.value() == b"0-0"]
    transaction, sequence = header_of(first)
    header = pack_run(transaction.bytes, sequence, 1, b"")
    scene.put(scene.topic, first.key(), first.value() or b"", header)
    assert scene.kinds() == {"foreign": 1, "doubled": 1}


def test_what_the_log_names_and_is_not_there_is_found(scene: Scene) -> None:
    scene.site.stop_coordinator()
    base = scene.put(scene.topic, None, b"says nothing of a transaction")
    scene.put(scene.topic, None, b"nor does this one")
    scene.forge_commit(UNKNOWN, [Run(0, base, 2)])
    found = scene.verify(ExitCode.UNEXPECTED)
    assert found["counts"] == {"missing": 1}
    assert f"{base} to {base + 1}" in found["findings"][0]["text"]


def test_a_record_in_the_place_of_another_one_is_found(scene: Scene) -> None:
    scene.site.stop_coordinator()
    other = TransactionId.of(0, (1 << 60) + 1)
    base = scene.put(scene.topic, None, b"of another one", pack_run(other.bytes, local_sequence(0, 0), 1, b""))
    scene.forge_commit(UNKNOWN, [Run(0, base, 1)])
    assert scene.kinds() == {"misplaced": 1}


def test_a_commit_that_stands_twice_on_the_log_is_found(scene: Scene) -> None:
    scene.site.stop_coordinator()
    base = scene.put(scene.topic, None, b"once", pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b""))
    for _ in range(2):
        scene.forge_commit(UNKNOWN, [Run(0, base, 1)])
    assert scene.kinds() == {"doubled": 1, "overlap": 1}


def test_more_records_than_have_arrived_are_found(scene: Scene) -> None:
    txn = scene.client.begin(scene.stream)
    txn.write(scene.stream, key=b"a", value=b"a")
    txn.flush()
    until(lambda: scene.client.outcome(txn.id).records == 1)
    begun_ms = scene.client.outcome(txn.id).since_ms
    scene.site.stop_coordinator()
    header = pack_run(txn.id.bytes, local_sequence(0, 0), 1, b"")
    base = scene.put(scene.topic, None, b"one", header)
    scene.put(scene.topic, None, b"two", pack_run(txn.id.bytes, local_sequence(0, 1), 1, b""))
    scene.forge_commit(txn.id, [Run(0, base, 2)], begun_ms)
    assert scene.kinds() == {"never-arrived": 1}
    scene.first_frame_again(txn.id)
    assert scene.kinds() == {"never-arrived": 1}, "what has come twice is there once"


def test_a_transaction_whose_first_frame_came_again_behind_those_that_are_gone_is_not_compared(scene: Scene) -> None:
    with scene.client.transaction(scene.stream) as txn:
        for number in range(4):
            txn.write(scene.stream, key=b"k", value=b"%d" % number)
            txn.flush()
    scene.site.stop_coordinator()
    place, offset = scene.first_frame_again(txn.id)
    assert scene.verify()["compared_with_buffers"] == 3
    with KafkaClient(scene.site.cluster.bootstrap_servers) as kafka:
        admin = kafka.topics
        admin.delete_records({place: offset})
    found = scene.verify()
    assert (found["records"]["matched"], found["compared_with_buffers"]) == (44, 0)


def test_what_retention_has_deleted_at_either_end_is_counted_and_no_finding(scene: Scene) -> None:
    scene.site.stop_coordinator()
    admin = KafkaClient(scene.site.cluster.bootstrap_servers).topics
    admin.delete_records({(scene.topic, 0): 5})
    found = scene.verify()
    assert (found["records"]["deleted"], found["records"]["matched"]) == (5, 35)
    admin.delete_records({(scene.log, 0): 2})
    found = scene.verify()
    assert found["log_start"] == 2
    assert found["records"]["forgotten"] + found["records"]["matched"] + found["records"]["deleted"] >= 35
    assert found["records"]["forgotten"] > 0
    assert "does not tell of any more" in scene.cli("verify", scene.stream).out


def test_what_is_deleted_while_a_stream_is_verified_is_counted_and_no_finding(scene: Scene) -> None:
    topic, admin = scene.topic, KafkaClient(scene.site.cluster.bootstrap_servers).topics
    scene.site.stop_coordinator()
    found = scene.verify_while(lambda: admin.delete_records({(topic, 0): 22}))
    assert (found.findings.named, found.tally.deleted, found.tally.matched) == ([], 21, 19)
    found = scene.verify_while(lambda: admin.delete_records({(scene.log, 0): 2}))
    assert (found.findings.named, found.log_start, found.transactions) == ([], 2, 1)
    assert found.tally.matched == 19
    found = scene.verify_while(lambda: admin.delete_records({(topic, 0): 42, (scene.log, 0): 3}))
    assert (found.findings.named, found.transactions) == ([], 0)
    found = scene.verify_while(lambda: admin.delete_topics([topic]))
    assert (found.findings.named, found.tally.matched) == ([], 0)


@pytest.mark.parametrize("reading", ["buffers", "commit log", "segments"])
def test_what_is_deleted_in_the_midst_of_the_reading_is_no_finding(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    monkeypatch.setattr("rollbridge.doctor.verify.FETCH_BYTES", 1)  # a batch at a time
    config = scene.client.admin.describe(scene.stream).config
    buffers = [(config.buffer_topic, number) for number in range(config.buffer_partitions)]
    places = {"buffers": buffers, "commit log": [(scene.log, 0)], "segments": [(scene.topic, 0)]}[reading]
    with KafkaClient(scene.site.cluster.bootstrap_servers) as kafka:
        admin = kafka.topics
        admin.delete_records(kafka.offsets.end(buffers))  # so that what follows is read first
        txn = scene.client.begin(scene.stream)
        for number in range(4):
            txn.write(scene.stream, key=b"k", value=b"%d" % number)
            txn.flush()
        txn.commit()
        with scene.client.transaction(scene.stream) as last:
            last.write(scene.stream, key=b"k", value=b"last")
        scene.site.stop_coordinator()
        ends = kafka.offsets.end(places)
        found = scene.verify_while(lambda: admin.delete_records({at: max(ends[at] - 2, 0) for at in places}), reading)
    assert found.findings.named == []
    tally = found.tally
    assert tally.matched + tally.deleted + tally.forgotten == 45
    assert (tally.deleted > 0, tally.forgotten > 0) == (reading == "segments", reading == "commit log")


def test_a_commit_that_contradicts_itself_or_the_stream_is_found(scene: Scene) -> None:
    scene.site.stop_coordinator()
    base = scene.put(scene.topic, None, b"one", pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b""))
    scene.forge_commit(UNKNOWN, [Run(0, base, 1)], records=2)
    assert scene.kinds() == {"corrupt": 1}
    other = TransactionId.of(0, (1 << 60) + 1)
    scene.forge_commit(other, [Run(0, 0, 1)], segment=SegmentId.of(7, 0))
    assert scene.kinds() == {"corrupt": 1, "unknown-segment": 1}
    scene.put(scene.log, other.bytes, b"no control record")
    assert scene.verify(ExitCode.UNEXPECTED)["records"]["matched"] == 41


def test_what_is_in_segments_that_are_gone_or_come_later_is_counted(scene: Scene) -> None:
    scene.client.admin.scale(scene.stream, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
    with scene.client.transaction(scene.stream) as txn:
        txn.write(scene.stream, key=b"k", value=b"behind")
    truncate_all(scene.client, scene.stream)
    until(lambda: scene.client.admin.history(scene.stream).is_removed(FIRST))
    records = scene.verify()["records"]
    assert (records["elsewhere"], records["deleted"], records["matched"]) == (40, 1, 0)
    history = scene.client.admin.history(scene.stream)
    scene.client.admin.scale(scene.stream, seal=[1], ranges=[(0.0, 0.5)])
    with scene.client.transaction(scene.stream) as txn:
        for number in range(20):
            txn.write(scene.stream, key=b"%d" % number, value=b"later")
    scene.site.stop_coordinator()
    settings = scene.client.settings
    config = scene.client.admin.describe(scene.stream).config
    found = verify(KafkaClient.of(settings), config, history)
    assert found.findings.named == []
    assert found.tally.elsewhere > 40
    assert found.tally.elsewhere + found.tally.matched == 60


def test_what_a_native_transaction_has_aborted_or_holds_open_is_no_finding(scene: Scene) -> None:
    header = pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b"")
    producer = Producer({"bootstrap.servers": scene.site.cluster.bootstrap_servers, "transactional.id": scene.stream})
    producer.init_transactions(60)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(scene.topic, b"signed", partition=0, headers=[(RECORD_HEADER, header)])
        assert producer.flush(60) == 0
        found = scene.verify()
        producer.abort_transaction(60)
        assert (found["records"]["matched"], found["findings"]) == (40, [])


def test_of_a_former_life_of_a_stream_nothing_is_found(scene: Scene) -> None:
    """Its commits are on the log beside those of this one."""
    scene.client.admin.delete_stream(scene.stream)
    scene.client.admin.create_stream(scene.stream)
    with scene.client.transaction(scene.stream) as txn:
        txn.write(scene.stream, key=b"k", value=b"of this life")
    records = scene.verify()["records"]
    assert (records["matched"], records["forgotten"], records["elsewhere"]) == (1, 0, 40)


@pytest.mark.parametrize(("other", "elsewhere"), [("-one", 1), ("-other", 0)])
def test_what_a_topic_holds_from_before_it_was_adopted_is_counted(scene: Scene, other: str, elsewhere: int) -> None:
    """As of a stream that had adopted it earlier, of the same name or of another one, or of a topic it is a copy of."""
    topic = scene.stream.replace("/", ".") + ".adopted"
    create_topic(scene.site.cluster.bootstrap_servers, topic)
    names = [scene.stream + "-one", scene.stream + other]
    for place, name in enumerate(names):
        if place:
            scene.client.admin.release_topic(topic)
        scene.client.admin.adopt_topic(topic, stream=name, partitioner="murmur2", check=False)
        with scene.client.transaction(name) as txn:
            txn.write(name, key=b"k", value=b"ours")
    adopted = Scene(scene.site, scene.client, scene.cli, names[1])
    records = adopted.verify()["records"]
    assert (records["matched"], records["forgotten"], records["elsewhere"]) == (1, 1, elsewhere)
    scene.put(topic, b"k", b"by hand", pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b""))
    assert adopted.kinds() == {"foreign": 1}


def test_a_stream_may_be_written_to_meanwhile(scene: Scene) -> None:
    open_one = scene.client.begin(scene.stream, timeout=timedelta(hours=1))
    open_one.write(scene.stream, key=b"a", value=b"still open")
    open_one.flush()
    assert scene.verify()["records"]["matched"] == 40
    open_one.commit()
    assert scene.verify()["records"]["matched"] == 41


def test_an_adopted_topic_is_verified_beside_the_records_of_natives(scene: Scene) -> None:
    topic = scene.stream.replace("/", ".") + ".adopted"
    admin = KafkaClient(scene.site.cluster.bootstrap_servers).topics
    admin.create_topics([TopicSpec(name=topic, partitions=1)])
    for _ in range(3):
        scene.put(topic, b"k", b"a native's")
    config = scene.client.admin.adopt_topic(
        topic, stream=scene.stream + "-adopted", partitioner="murmur2", check=False
    ).config
    stream = str(config.name)
    with scene.client.transaction(stream) as txn:
        for place in range(12):
            txn.write(stream, key=b"%d" % place, value=b"ours")
    scene.put(topic, b"k", b"a native's")
    adopted = Scene(scene.site, scene.client, scene.cli, stream)
    records = adopted.verify()["records"]
    assert (records["matched"], records["plain"]) == (12, 4)
    scene.put(topic, b"k", b"by hand", pack_run(UNKNOWN.bytes, local_sequence(0, 0), 1, b""))
    assert adopted.kinds() == {"foreign": 1}

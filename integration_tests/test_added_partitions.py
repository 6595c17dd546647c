"""Partitions that the owner of an adopted topic adds: taken in by themselves, by whoever writes or reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewPartitions

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, adopt, consumer_of, read_committed
from integration_tests.command_line import Cli
from integration_tests.gateway_clients import producer_of
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from rollbridge.base.sn import ANY, EMPTY
from rollbridge.client.transaction import writing_of
from rollbridge.errors import CasWriteError, ConflictError, TransactionRefusedError
from rollbridge.stream.keyspace import Partitioner, native_partition
from rollbridge.stream.positions import ReadPosition

BEFORE, AFTER = 2, 5
KEYS = [b"key-%d" % number for number in range(40)]


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One whose leader looks at adopted topics often."""
    logs = tmp_path_factory.mktemp("coordinators")
    with Site(cluster, f"/{logs.name}-added", logs, CONSTANT_TOPIC_CHECK_MS="200") as site:
        yield site


@pytest.fixture
def topic(site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> str:
    """A topic that a stream has adopted."""
    name = unique_name("shop.orders")
    create_topic(site.cluster.bootstrap_servers, name, BEFORE)
    adopt(client, name, partitioner="murmur2")
    return name


def add_partitions(site: Site, topic: str, count: int = AFTER) -> None:
    """Add partitions, as an owner does."""
    admin = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, count)])[topic].result(120)


def taken_in(client: rollbridge.Bridge, topic: str, count: int = AFTER) -> None:
    """Wait until the leader has made the epoch, and this client knows it."""
    eventually(lambda: client.admin.describe(topic).config.partitions == count, "the leader has taken them in")


def native(site: Site, topic: str, word: bytes) -> None:
    """Write a record of each key as a Java producer does, to the partitions that there are now."""
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "partitioner": "murmur2_random"})
    for key in KEYS:
        producer.produce(topic, word + key, key)
    assert producer.flush(60) == 0


def words(word: bytes) -> Counter[bytes]:
    return Counter(word + key for key in KEYS)


def in_partitions(site: Site, topic: str) -> dict[bytes, int]:
    """The partition of each value that a plain consumer finds."""
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=AFTER)
    values = Counter(message.value() for message in found)
    assert max(values.values()) == 1
    return {message.value() or b"": message.partition() or 0 for message in found}


def of_key(key: bytes, count: int = AFTER) -> int:
    return native_partition(Partitioner.MURMUR2, key, count)


def test_open_transactions_of_ours_and_of_a_gateway_go_on_in_old_and_new_partitions(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str
) -> None:
    ours = client.begin(topic)
    for key in KEYS:
        ours.write(topic, key, b"ours-early-" + key)
    ours.flush()
    producer = producer_of(gateway, f"lib-{topic}", **{"topic.metadata.refresh.interval.ms": 500})
    producer.init_transactions(60)
    producer.begin_transaction()
    for number, key in enumerate(KEYS):
        producer.produce(topic, b"theirs-early-" + key, key, partition=number % BEFORE)
    assert producer.flush(60) == 0
    reader, writer = client.reader(topic), client.writer(topic)
    writer.write(KEYS[0], b"plain-early").result()
    with consumer_of(site.cluster, site.root, f"group-{topic}", topic) as consumer:
        site.stop_coordinator()  # so that nobody takes them in yet
        add_partitions(site, topic)
        eventually(
            lambda: len(producer.list_topics(topic, 10).topics[topic].partitions) == AFTER, "its clients see them"
        )
        told: list[KafkaError | None] = []
        for number, key in enumerate(KEYS):
            producer.produce(
                topic,
                b"theirs-late-" + key,
                key,
                partition=number % AFTER,
                on_delivery=lambda error, _: told.append(error),
            )
        of_old = sum(number % AFTER < BEFORE for number in range(len(KEYS)))
        eventually(lambda: (producer.poll(0.1), len(told) == of_old)[1], "what goes to the old ones is acknowledged")
        site.start_coordinator()
        assert producer.flush(60) == 0
        assert told == [None] * len(KEYS), "what came too early was asked for again"
        taken_in(client, topic)

        def goes_everywhere() -> bool:
            return len(writing_of(ours).part_stream(topic).slots) == AFTER

        eventually(goes_everywhere, "the open transaction writes to all of them")
        for key in KEYS:
            ours.write(topic, key, b"ours-late-" + key)
        native(site, topic, b"native-")
        assert set(in_partitions(site, topic)) == {*words(b"native-"), b"plain-early"}, (
            "nothing of what is open is seen"
        )
        producer.commit_transaction(60)
        assert ours.commit().records == 2 * len(KEYS)
        with client.transaction(topic) as later:
            for key in KEYS:
                later.write(topic, key, b"later-" + key)
        for key in KEYS:
            writer.write(key, b"plain-" + key)
        writer.close()
        expected = Counter(
            b"%s-%s" % (word, key)
            for word in (b"native", b"later", b"plain", b"ours-early", b"ours-late", b"theirs-early", b"theirs-late")
            for key in KEYS
        )
        expected[b"plain-early"] = 1
        places = in_partitions(site, topic)
        assert Counter(places.keys()) == expected
        for number, key in enumerate(KEYS):
            for word in (b"native-", b"later-", b"plain-", b"ours-late-"):
                assert places[word + key] == of_key(key), word
            assert places[b"ours-early-" + key] == of_key(key, BEFORE)
            assert places[b"theirs-early-" + key] == number % BEFORE
            assert places[b"theirs-late-" + key] == number % AFTER
        followed: Counter[bytes | None] = Counter()
        while sum(followed.values()) < sum(expected.values()):
            followed.update(record.value for record in reader.consume(1_000, 1.0))
        assert followed == expected, "a reader takes the new ones up from their beginning"
        got: Counter[bytes | None] = Counter()
        while sum(got.values()) < sum(expected.values()):
            got.update(item.value() for item in consumer.consume(1_000, 1.0) if item.error() is None)
        assert got == expected, "so does a consumer of a group"
    reader.close()
    assert Counter(record.value for record in client.reader(topic, follow=False)) == expected
    assert [record.cause for record in client.admin.history(topic).records] == ["create", "grown"]
    assert client.admin.describe(topic).fault is None
    cli = Cli(site.cluster, site.root)
    for arguments in (("verify", topic), ("doctor",)):
        said = cli(*arguments)
        assert said.code == 0, said.out + said.err
    # It can be given back, and is as its owner has made it.
    client.admin.release_topic(topic)
    assert in_partitions(site, topic) == places


def test_a_group_that_begins_at_the_latest_records_misses_nothing_of_an_added_partition(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    native(site, topic, b"old-")
    settings = {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
        "group.id": f"latest-{topic}",
        "auto.offset.reset": "latest",
    }
    with rollbridge.Consumer(settings) as consumer:
        consumer.subscribe([topic])
        seen: Counter[bytes | None] = Counter()

        def poll() -> None:
            seen.update(item.value() for item in consumer.consume(1_000, 1.0) if item.error() is None)

        def has_begun() -> bool:
            poll()
            return len(consumer.assignment()) == BEFORE and all(
                item.offset >= 0 for item in consumer.committed(consumer.assignment(), 60)
            )

        eventually(has_begun, "it has begun")
    add_partitions(site, topic)
    native(site, topic, b"new-")
    taken_in(client, topic)
    with rollbridge.Consumer(settings) as consumer:
        consumer.subscribe([topic])
        while sum(seen.values()) < len(KEYS):
            poll()
    assert seen == words(b"new-")


def test_a_saved_position_goes_on_with_the_added_partitions_from_their_beginning(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    native(site, topic, b"old-")
    with client.reader(topic) as reader:
        seen: list[bytes | None] = []
        while len(seen) < len(KEYS):
            seen += [record.value for record in reader.consume(1_000, 1.0)]
        saved = str(reader.position)
    assert len(ReadPosition.parse(saved).offsets) == BEFORE
    add_partitions(site, topic)
    native(site, topic, b"new-")
    taken_in(client, topic)
    later = [record.value for record in client.reader(topic, start=saved, follow=False)]
    assert Counter(later) == words(b"new-")
    assert Counter(in_partitions(site, topic)[value or b""] for value in later).keys() == set(range(AFTER))


def test_a_transaction_of_before_commits_after_the_topic_has_grown_and_was_left(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    early = client.begin(topic)
    for key in KEYS:
        early.write(topic, key, b"early-" + key)
    early.flush()
    add_partitions(site, topic)
    taken_in(client, topic)
    native(site, topic, b"native-")
    active = client.admin.history(topic).active.segments[0]
    client.admin.scale(topic, seal=[0], ranges=[(active.range.low, active.range.high)], leave_topic=True)
    assert early.commit().records == len(KEYS)
    with client.transaction(topic) as later:
        for key in KEYS:
            later.write(topic, key, b"later-" + key)
    read = [record.value for record in client.reader(topic, follow=False)]
    assert Counter(read) == words(b"early-") + words(b"native-") + words(b"later-")


def moved_key() -> bytes:
    """A key that goes from an old partition to a new one."""
    return next(key for key in KEYS if of_key(key) >= BEFORE)


def test_an_expectation_of_a_key_that_has_moved_is_refused_with_its_reason(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    moved, stays = moved_key(), next(key for key in KEYS if of_key(key) == of_key(key, BEFORE))
    cas = client.cas_writer(topic)
    first = {key: cas.write(key, b"first-" + key, expected=EMPTY, scope="key") for key in (moved, stays)}
    add_partitions(site, topic)
    taken_in(client, topic)
    with client.transaction(topic) as probe:
        eventually(lambda: len(writing_of(probe).part_stream(topic).slots) == AFTER, "this client knows")
    reason = f"is in partition {of_key(moved)} now and was in {of_key(moved, BEFORE)}"
    for expected in (first[moved], EMPTY):
        with pytest.raises(CasWriteError, match=f"525: .*{reason}") as refused:
            cas.write(moved, b"second", expected=expected, scope="key")
        assert refused.value.actual == first[moved]
        transaction = client.begin(topic)
        transaction.write(topic, moved, b"in a transaction")
        transaction.expect(topic, key=moved, sn=expected, scope="key")
        with pytest.raises(TransactionRefusedError, match=f"525: .*{reason}"):
            transaction.commit()
    anew = cas.write(moved, b"anew", expected=ANY)
    third = cas.write(moved, b"third", expected=anew, scope="key")
    assert cas.tail(moved, scope="key") == third
    cas.write(stays, b"second", expected=first[stays], scope="key")
    unused = next(key for key in (b"new-%d" % number for number in range(99)) if of_key(key) >= BEFORE)
    cas.write(unused, b"unused", expected=EMPTY, scope="key")
    with client.transaction(topic) as transaction:
        transaction.write(topic, moved, b"fourth")
        transaction.expect(topic, key=moved, sn=third, scope="key")
    places = in_partitions(site, topic)
    assert [places[value] for value in (b"anew", b"third", b"fourth")] == [of_key(moved)] * 3
    assert b"in a transaction" not in places
    cas.close()


def test_a_write_of_a_key_that_has_moved_is_found_by_its_token_and_written_once(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    moved = moved_key()
    other = next(key for key in KEYS if of_key(key) >= BEFORE and of_key(key, BEFORE) != of_key(moved, BEFORE))
    cas = client.cas_writer(topic)
    first = cas.write(moved, b"first", expected=EMPTY, scope="key")
    token, alone = cas.token(moved, expected=first), cas.token(other, expected=EMPTY)
    paid = cas.write(moved, b"paid", expected=first, scope="key", token=token)
    begun = cas.write(other, b"begun", expected=EMPTY, token=alone)
    add_partitions(site, topic)
    taken_in(client, topic)
    placed = replace(token, place=paid.dlsn)
    assert [cas.outcome(item) for item in (token, str(placed), alone)] == [paid, paid, begun]
    assert cas.write(moved, b"paid", expected=first, scope="key", token=token) == paid
    # The partition in which the key lies now is empty, as is expected.
    assert cas.write(other, b"begun", expected=EMPTY, token=alone) == begun
    assert cas.write_async(other, b"begun", expected=EMPTY, token=alone).result(60) == begun
    assert cas.outcome(cas.token(moved, expected=EMPTY)) is None
    cas.close()
    assert in_partitions(site, topic).keys() == {b"first", b"paid", b"begun"}


def test_conditions_see_a_transaction_of_before_that_is_committed_after_the_topic_was_left(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    moved, other, third = [key for key in KEYS if of_key(key) >= BEFORE][:3]
    early = client.begin(topic)
    for key in (moved, other, third):
        early.write(topic, key, b"early-" + key)
    early.flush()
    add_partitions(site, topic)
    taken_in(client, topic)
    cas = client.cas_writer(topic)
    since = cas.write(moved, b"since", expected=ANY)
    client.admin.scale(topic, seal=list(range(AFTER)), ranges=[(0.0, 0.5), (0.5, 1.0)], leave_topic=True)
    assert cas.tail(moved, scope="key") == since
    assert early.commit().records == 3
    for key, expected in ((moved, since), (other, EMPTY)):
        with pytest.raises(CasWriteError, match=r"525: .*read it again"):
            cas.write(key, b"no", expected=expected, scope="key")
    transaction = client.begin(topic)
    transaction.write(topic, third, b"no")
    transaction.expect(topic, key=third, sn=EMPTY, scope="key")
    with pytest.raises(TransactionRefusedError, match=r"525: .*read it again"):
        transaction.commit()
    anew = cas.write(moved, b"anew", expected=ANY)
    cas.write(moved, b"then", expected=anew, scope="key")
    cas.close()


def test_a_synchronizer_whose_key_has_moved_says_so_and_loses_nothing_in_silence(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    def joined(state: bytes, update: bytes) -> bytes:
        return state + update

    moved = moved_key()
    with client.synchronizer(topic, moved, b"", joined) as one:
        one.update(lambda state: [b"a"])
    add_partitions(site, topic)
    taken_in(client, topic)
    with site.connect("later") as later:
        with pytest.raises(ConflictError, match="start under another key"):
            later.synchronizer(topic, moved, b"", joined)
        other = next(key for key in (b"new-%d" % number for number in range(99)) if of_key(key) >= BEFORE)
        with later.synchronizer(topic, other, b"", joined) as fresh:
            fresh.update(lambda state: [b"b"])
            assert fresh.state == b"b"

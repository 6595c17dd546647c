"""What the owner of an adopted topic may do while transactions of ours, and native ones, are open on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.adopted_topics import KEYS, PARTITIONS, create_anew, found, grow, kafka, native, site, topic
from integration_tests.clients import Site, adopt, consumer_of
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.doctor.verify import make_plan
from rollbridge.errors import InvalidRequestError, TransactionAbortedError, TruncatedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.changes import TOPIC_DELETED, TOPIC_RECREATED

__all__ = ["kafka", "site", "topic"]


def fault_of(client: rollbridge.Bridge, topic: str) -> str | None:
    """The code of what is wrong with a stream's topic, as its leader has put it on record."""
    fault = client.admin.describe(topic).fault
    return None if fault is None else fault.code


def goes_on(client: rollbridge.Bridge, ledger: str) -> None:
    """Commit to another stream of the scope."""
    with client.transaction(ledger) as transaction:
        transaction.write(ledger, b"k", b"goes on")


def begun(client: rollbridge.Bridge, topic: str, word: bytes) -> rollbridge.Transaction:
    """A transaction with a record of each key, all of which are acknowledged."""
    transaction = client.begin(topic)
    for key in KEYS:
        transaction.write(topic, key, word + key)
    transaction.flush()
    return transaction


def is_kept(client: rollbridge.Bridge, topic: str) -> bool:
    """Whether partitions of an adopted topic are still segments of its stream."""
    return any(map(client.admin.describe(topic).config.places.is_adopted, client.admin.history(topic).stored()))


def ours(word: bytes) -> set[bytes]:
    return {word + key for key in KEYS}


def test_what_is_open_is_committed_when_the_owner_adds_partitions(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, topic: str
) -> None:
    adopt(client, topic, partitioner="murmur2")
    early, late = begun(client, topic, b"early-"), begun(client, topic, b"late-")
    grow(kafka, topic)
    early.commit()
    eventually(lambda: client.admin.describe(topic).config.partitions > PARTITIONS, "the leader has taken it in")
    assert late.commit().records == len(KEYS)
    with client.transaction(topic) as transaction:
        transaction.write(topic, KEYS[0], b"begun later")
    assert fault_of(client, topic) is None
    assert set(found(site, topic, PARTITIONS + 1)) == {*ours(b"early-"), *ours(b"late-"), b"begun later"}


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "at-once"])
@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "anew"])
def test_commits_to_a_topic_that_is_gone_end_as_aborted_and_say_why(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, topic: str, ledger: str, anew: bool, noticed: bool
) -> None:
    adopt(client, topic, partitioner="murmur2")
    transaction, other = begun(client, topic, b"ours-"), begun(client, topic, b"other-")
    if anew:
        create_anew(site, kafka, topic)
    else:
        kafka.delete_topics([topic])[topic].result(120)
    expected = TOPIC_RECREATED if anew else TOPIC_DELETED
    if noticed:
        eventually(lambda: fault_of(client, topic) == expected, "the leader has noticed")
    waiting = transaction.commit_async()
    eventually(lambda: fault_of(client, topic) == expected, "the leader has noticed")
    goes_on(client, ledger)
    config, history = client.admin.describe(topic).config, client.admin.history(topic)
    assert not make_plan(KafkaClient(site.cluster.bootstrap_servers), config, history).segments, "nothing to verify"
    refused = waiting.exception(PATIENCE_S)
    if refused is not None:
        assert isinstance(refused, TransactionAbortedError)
        assert f"topic {topic} was deleted" in str(refused)
        assert noticed or not anew or not [value for value in found(site, topic) if value in ours(b"ours-")]
    else:
        # Kafka knows topics by name: what was committed before anybody could notice may stand in the new one.
        assert anew
        assert not noticed
    client.admin.release_topic(topic)
    with pytest.raises(TransactionAbortedError, match=f"topic {topic} was deleted"):
        other.commit()
    goes_on(client, ledger)
    if not anew:
        create_topic(site.cluster.bootstrap_servers, topic, PARTITIONS)
    adopt(client, topic, partitioner="murmur2")
    with client.transaction(topic) as next_one:
        next_one.write(topic, KEYS[0], b"next life")
    assert b"next life" in found(site, topic)
    assert not [value for value in found(site, topic) if value in ours(b"other-")]


def test_a_release_is_refused_while_transactions_are_open_and_changes_nothing(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    adopt(client, topic, partitioner="murmur2")
    transaction = begun(client, topic, b"ours-")
    eventually(lambda: transaction.id in [item.id for item in client.admin.transactions()], "its leader has read it")
    with raises_code("stream-busy"):
        client.admin.release_topic(topic)
    transaction.commit()
    client.admin.release_topic(topic)
    assert set(found(site, topic)) == ours(b"ours-")


def test_a_scale_leaves_a_topic_only_where_it_is_told_to(site: Site, client: rollbridge.Bridge, topic: str) -> None:
    adopt(client, topic, partitioner="murmur2")
    admin = KafkaClient(site.cluster.bootstrap_servers).topics
    was, history = admin.describe([topic]), client.admin.history(topic)
    with pytest.raises(InvalidRequestError, match="--leave-topic"):
        client.admin.scale(topic, seal=[0], ranges=[(0.0, 0.1), (0.1, 0.25)])
    assert admin.describe([topic]) == was
    assert client.admin.history(topic).records == history.records
    begun(client, topic, b"ours-").commit()
    native(site, topic, [b"native"])
    assert set(found(site, topic)) == {*ours(b"ours-"), b"native"}


@pytest.mark.parametrize("wish", ["commit", "abort", "abort-foreign"])
def test_a_topic_is_left_once_what_native_producers_have_open_has_ended(
    site: Site, client: rollbridge.Bridge, topic: str, ledger: str, unique_name: Callable[[str], str], wish: str
) -> None:
    adopt(client, topic, partitioner="murmur2")
    servers = site.cluster.bootstrap_servers
    open_one = Producer(
        {"bootstrap.servers": servers, "partitioner": "murmur2_random", "transactional.id": unique_name("native")}
    )
    open_one.init_transactions(PATIENCE_S)
    open_one.begin_transaction()
    open_one.produce(topic, b"open", KEYS[0])
    assert open_one.flush(30) == 0
    admin = KafkaClient(servers).topics
    was, split = admin.describe([topic]), [(0.0, 0.1), (0.1, 0.25)]
    with raises_code("stream-busy", match="nothing was changed"):
        client.admin.scale(topic, seal=[0], ranges=split, leave_topic=True)
    assert admin.describe([topic]) == was
    native(site, topic, [b"beside"])
    goes_on(client, ledger)
    if wish == "commit":
        open_one.commit_transaction(30)
    elif wish == "abort":
        open_one.abort_transaction(30)
    client.admin.scale(topic, seal=[0], ranges=split, leave_topic=True, abort_foreign=wish == "abort-foreign")
    assert admin.closed([topic]) == {topic}
    if wish == "abort-foreign":
        with pytest.raises(KafkaException):
            open_one.commit_transaction(30)
    refused: list[KafkaError | None] = []
    plain = Producer({"bootstrap.servers": servers})
    plain.produce(topic, bytes(100), KEYS[0], on_delivery=lambda error, _: refused.append(error))
    assert plain.flush(30) == 0
    assert [error.code() for error in refused if error] == [KafkaError.MSG_SIZE_TOO_LARGE]
    begun(client, topic, b"elsewhere-").commit()
    expected = {*ours(b"elsewhere-"), b"beside", *([b"open"] if wish == "commit" else [])}
    assert {record.value for record in client.reader(topic, follow=False)} == expected


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "anew"])
def test_a_topic_that_a_stream_has_left_may_be_deleted(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, topic: str, anew: bool
) -> None:
    """Readers are told of what is lost, and new ones and consumer groups read what is left."""
    adopt(client, topic, partitioner="murmur2")
    begun(client, topic, b"lost-").commit()
    with client.reader(topic) as reader:
        next(iter(reader))
        position = str(reader.position)
    halves = [(0.0, 0.5), (0.5, 1.0)]
    client.admin.scale(topic, seal=list(range(PARTITIONS)), ranges=halves, leave_topic=True)
    begun(client, topic, b"kept-").commit()
    if anew:
        create_anew(site, kafka, topic)
        # Until then who subscribes is told to try again in a minute.
        eventually(lambda: not is_kept(client, topic), "its segments are removed")
    else:
        kafka.delete_topics([topic])[topic].result(120)
    with consumer_of(site.cluster, site.root, f"new-{topic}", topic) as consumer:
        read: set[bytes | None] = set()
        while len(read) < len(KEYS):
            read |= {item.value() for item in consumer.consume(100, 1.0) if item.error() is None}
        assert read == ours(b"kept-")
    assert not is_kept(client, topic)
    assert {record.value for record in client.reader(topic, follow=False)} == ours(b"kept-")
    with pytest.raises(TruncatedError):
        next(iter(client.reader(topic, start=position)))

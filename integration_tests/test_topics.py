"""Administration of topics against a real broker: every call can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.adapter_tools import batch_of, read_values
from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import eventually
from rollbridge.errors import ConflictError, InvalidRequestError, KafkaUnavailableError, NotFoundError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec


@pytest.fixture
def kafka(cluster: AnyCluster) -> KafkaClient:
    return KafkaClient(cluster.bootstrap_servers)


@pytest.fixture
def appender(cluster: AnyCluster, topic_prefix: str) -> Iterator[TransactionalAppender]:
    with KafkaClient(cluster.bootstrap_servers).appender(topic_prefix) as appender:
        appender.init()
        yield appender


def test_creating_is_repeatable(kafka: KafkaClient, topic_prefix: str) -> None:
    a = TopicSpec(name=f"{topic_prefix}-a", config={"retention.ms": "-1", "max.message.bytes": "2000000"})
    b = TopicSpec(name=f"{topic_prefix}-b", partitions=3)
    assert kafka.topics.create_topics([a]) == {a.name}
    ids = kafka.topics.topic_ids([a.name])
    assert kafka.topics.create_topics([a, b]) == {b.name}
    assert kafka.topics.create_topics([a, b]) == set()
    assert kafka.topics.create_topics([]) == set()
    assert kafka.topics.topic_ids([a.name]) == ids
    described = kafka.topics.describe([a.name, b.name, "missing"])
    assert set(described) == {a.name, b.name}
    assert (described[a.name].partitions, described[b.name].partitions) == (1, 3)
    assert described[a.name].topic_id == ids[a.name]
    assert described[a.name].config["retention.ms"] == "-1"
    assert not described[a.name].sealed


def test_a_topic_that_differs_is_named_and_left_alone(kafka: KafkaClient, topic_prefix: str) -> None:
    kafka.topics.create_topics([TopicSpec(name=topic_prefix, config={"retention.ms": "1000"})])
    with pytest.raises(ConflictError) as mismatch:
        kafka.topics.create_topics([TopicSpec(name=topic_prefix, partitions=2, config={"retention.ms": "-1"})])
    assert mismatch.value.resource == f"topic {topic_prefix}"
    assert vars(mismatch.value)["differences"] == {"partitions": ("2", "1"), "retention.ms": ("-1", "1000")}
    assert kafka.topics.describe([topic_prefix])[topic_prefix].config["retention.ms"] == "1000"
    with pytest.raises(ConflictError):
        kafka.topics.create_topics([TopicSpec(name=f"{topic_prefix}-b"), TopicSpec(name=topic_prefix, partitions=2)])
    assert set(kafka.topics.topic_ids([topic_prefix, f"{topic_prefix}-b"])) == {topic_prefix}, "nothing is left behind"


def test_a_sealed_topic_counts_as_created(kafka: KafkaClient, topic_prefix: str) -> None:
    spec = TopicSpec(name=topic_prefix, config={"max.message.bytes": "2000000"})
    kafka.topics.create_topics([spec])
    kafka.topics.seal([topic_prefix])
    assert kafka.topics.describe([topic_prefix])[topic_prefix].sealed
    assert kafka.topics.create_topics([spec]) == set()


def test_wrong_names_and_settings_are_invalid(kafka: KafkaClient, topic_prefix: str) -> None:
    for spec in (
        TopicSpec(name="no/slashes"),
        TopicSpec(name="x" * 250),
        TopicSpec(name=topic_prefix, config={"no.such.setting": "1"}),
        TopicSpec(name=topic_prefix, partitions=0),
    ):
        with pytest.raises(InvalidRequestError):
            kafka.topics.create_topics([spec])
    assert kafka.topics.topic_ids([topic_prefix]) == {}


def test_of_several_topics_of_which_one_is_wrong_none_is_created(kafka: KafkaClient, topic_prefix: str) -> None:
    with pytest.raises(InvalidRequestError, match="no/slashes"):
        kafka.topics.create_topics([TopicSpec(name="no/slashes"), TopicSpec(name=topic_prefix)])
    assert kafka.topics.topic_ids([topic_prefix]) == {}, "none of them was created"
    assert kafka.topics.create_topics([TopicSpec(name=topic_prefix)]) == {topic_prefix}


def test_deleting_by_id_leaves_what_was_made_anew_under_the_name(kafka: KafkaClient, topic_prefix: str) -> None:
    spec = TopicSpec(name=topic_prefix)
    kafka.topics.create_topics([spec])
    before = kafka.topics.topic_ids([topic_prefix])
    assert kafka.topics.delete_topics(before) == {topic_prefix}
    assert kafka.topics.delete_topics(before) == set()
    kafka.topics.create_topics([spec])
    after = kafka.topics.topic_ids([topic_prefix])
    assert kafka.topics.delete_topics(before) == set()
    assert kafka.topics.topic_ids([topic_prefix]) == after
    assert kafka.topics.delete_topics({}) == set()
    other = TopicSpec(name=f"{topic_prefix}-other")
    kafka.topics.create_topics([other])
    assert kafka.topics.delete_topics(before | kafka.topics.topic_ids([other.name])) == {other.name}
    assert kafka.topics.topic_ids([topic_prefix, other.name]) == after


def test_settings_change_alone(kafka: KafkaClient, topic_prefix: str) -> None:
    config = {"retention.ms": "1000", "cleanup.policy": "compact"}
    kafka.topics.create_topics([TopicSpec(name=topic_prefix, config=config)])
    kafka.topics.set_topic_config(topic_prefix, {"retention.ms": "2000"})

    def described() -> tuple[str, str]:
        config = kafka.topics.describe([topic_prefix])[topic_prefix].config
        return config["retention.ms"], config["cleanup.policy"]

    # The controller has accepted it; the broker that is asked hears of it a little later.
    eventually(lambda: described() == ("2000", "compact"), "the setting has changed, and no other")
    with pytest.raises(InvalidRequestError):
        kafka.topics.set_topic_config(topic_prefix, {"retention.ms": "soon"})
    with pytest.raises(NotFoundError):
        kafka.topics.set_topic_config(f"{topic_prefix}-missing", {"retention.ms": "1"})
    kafka.topics.set_topic_config([], {"retention.ms": "1"})


def test_ends_and_truncation(
    kafka: KafkaClient, appender: TransactionalAppender, cluster: AnyCluster, topic_prefix: str
) -> None:
    kafka.topics.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    appender.append([(topic_prefix, 1, batch_of([b"a", b"b", b"c"]))])
    places = [(topic_prefix, 0), (topic_prefix, 1)]
    assert kafka.offsets.end(places) == {(topic_prefix, 0): 0, (topic_prefix, 1): 3}
    assert kafka.offsets.end(places, Isolation.READ_COMMITTED) == dict.fromkeys(places, 0)
    assert kafka.offsets.end([topic_prefix]) == {topic_prefix: 0}
    appender.commit()
    assert kafka.topics.delete_records({(topic_prefix, 1): 2}) == {(topic_prefix, 1): 2}
    # Deleting less than has been deleted changes nothing.
    assert kafka.topics.delete_records({(topic_prefix, 1): 1}) == {(topic_prefix, 1): 2}
    with pytest.raises(InvalidRequestError):
        kafka.topics.delete_records({(topic_prefix, 1): 1_000})
    with pytest.raises(NotFoundError):
        kafka.offsets.end([f"{topic_prefix}-missing"])
    with pytest.raises(NotFoundError):
        kafka.topics.delete_records({f"{topic_prefix}-missing": 0})
    assert kafka.offsets.end([]) == {}
    assert kafka.topics.delete_records({}) == {}
    assert read_values(cluster.bootstrap_servers, topic_prefix, partition=1, first=2) == [b"c"]


def test_nobody_there_is_unavailable() -> None:
    kafka = KafkaClient("127.0.0.1:1", timeout_s=0.3)
    with pytest.raises(KafkaUnavailableError):
        kafka.topics.cluster_id()
    with pytest.raises(KafkaUnavailableError):
        kafka.topics.create_topics([TopicSpec(name="x")])
    with pytest.raises(KafkaUnavailableError):
        kafka.topics.seal(["x"], timeout_s=0.3)

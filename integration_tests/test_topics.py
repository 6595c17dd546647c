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
from rollbridge.kafka.topics import TopicAdmin, TopicSpec


@pytest.fixture
def admin(cluster: AnyCluster) -> TopicAdmin:
    return KafkaClient(cluster.bootstrap_servers).topics


@pytest.fixture
def appender(cluster: AnyCluster, topic_prefix: str) -> Iterator[TransactionalAppender]:
    with KafkaClient(cluster.bootstrap_servers).appender(topic_prefix) as appender:
        appender.init()
        yield appender


def test_creating_is_repeatable(admin: TopicAdmin, topic_prefix: str) -> None:
    a = TopicSpec(name=f"{topic_prefix}-a", config={"retention.ms": "-1", "max.message.bytes": "2000000"})
    b = TopicSpec(name=f"{topic_prefix}-b", partitions=3)
    assert admin.create_topics([a]) == {a.name}
    ids = admin.topic_ids([a.name])
    assert admin.create_topics([a, b]) == {b.name}
    assert admin.create_topics([a, b]) == set()
    assert admin.create_topics([]) == set()
    assert admin.topic_ids([a.name]) == ids
    described = admin.describe([a.name, b.name, "missing"])
    assert set(described) == {a.name, b.name}
    assert (described[a.name].partitions, described[b.name].partitions) == (1, 3)
    assert described[a.name].topic_id == ids[a.name]
    assert described[a.name].config["retention.ms"] == "-1"
    assert not described[a.name].sealed


def test_a_topic_that_differs_is_named_and_left_alone(admin: TopicAdmin, topic_prefix: str) -> None:
    admin.create_topics([TopicSpec(name=topic_prefix, config={"retention.ms": "1000"})])
    with pytest.raises(ConflictError) as mismatch:
        admin.create_topics([TopicSpec(name=topic_prefix, partitions=2, config={"retention.ms": "-1"})])
    assert mismatch.value.resource == f"topic {topic_prefix}"
    assert vars(mismatch.value)["differences"] == {"partitions": ("2", "1"), "retention.ms": ("-1", "1000")}
    assert admin.describe([topic_prefix])[topic_prefix].config["retention.ms"] == "1000"
    with pytest.raises(ConflictError):
        admin.create_topics([TopicSpec(name=f"{topic_prefix}-b"), TopicSpec(name=topic_prefix, partitions=2)])
    assert set(admin.topic_ids([topic_prefix, f"{topic_prefix}-b"])) == {topic_prefix}, "nothing is left behind"


def test_a_sealed_topic_counts_as_created(admin: TopicAdmin, topic_prefix: str) -> None:
    spec = TopicSpec(name=topic_prefix, config={"max.message.bytes": "2000000"})
    admin.create_topics([spec])
    admin.seal([topic_prefix])
    assert admin.describe([topic_prefix])[topic_prefix].sealed
    assert admin.create_topics([spec]) == set()


def test_wrong_names_and_settings_are_invalid(admin: TopicAdmin, topic_prefix: str) -> None:
    for spec in (
        TopicSpec(name="no/slashes"),
        TopicSpec(name="x" * 250),
        TopicSpec(name=topic_prefix, config={"no.such.setting": "1"}),
        TopicSpec(name=topic_prefix, partitions=0),
    ):
        with pytest.raises(InvalidRequestError):
            admin.create_topics([spec])
    assert admin.topic_ids([topic_prefix]) == {}


def test_of_several_topics_of_which_one_is_wrong_none_is_created(admin: TopicAdmin, topic_prefix: str) -> None:
    with pytest.raises(InvalidRequestError, match="no/slashes"):
        admin.create_topics([TopicSpec(name="no/slashes"), TopicSpec(name=topic_prefix)])
    assert admin.topic_ids([topic_prefix]) == {}, "none of them was created"
    assert admin.create_topics([TopicSpec(name=topic_prefix)]) == {topic_prefix}


def test_deleting_by_id_leaves_what_was_made_anew_under_the_name(admin: TopicAdmin, topic_prefix: str) -> None:
    spec = TopicSpec(name=topic_prefix)
    admin.create_topics([spec])
    before = admin.topic_ids([topic_prefix])
    assert admin.delete_topics(before) == {topic_prefix}
    assert admin.delete_topics(before) == set()
    admin.create_topics([spec])
    after = admin.topic_ids([topic_prefix])
    assert admin.delete_topics(before) == set()
    assert admin.topic_ids([topic_prefix]) == after
    assert admin.delete_topics({}) == set()
    other = TopicSpec(name=f"{topic_prefix}-other")
    admin.create_topics([other])
    assert admin.delete_topics(before | admin.topic_ids([other.name])) == {other.name}
    assert admin.topic_ids([topic_prefix, other.name]) == after


def test_settings_change_alone(admin: TopicAdmin, topic_prefix: str) -> None:
    admin.create_topics([TopicSpec(name=topic_prefix, config={"retention.ms": "1000", "cleanup.policy": "compact"})])
    admin.set_topic_config(topic_prefix, {"retention.ms": "2000"})

    def described() -> tuple[str, str]:
        config = admin.describe([topic_prefix])[topic_prefix].config
        return config["retention.ms"], config["cleanup.policy"]

    # The controller has accepted it; the broker that is asked hears of it a little later.
    eventually(lambda: described() == ("2000", "compact"), "the setting has changed, and no other")
    with pytest.raises(InvalidRequestError):
        admin.set_topic_config(topic_prefix, {"retention.ms": "soon"})
    with pytest.raises(NotFoundError):
        admin.set_topic_config(f"{topic_prefix}-missing", {"retention.ms": "1"})
    admin.set_topic_config([], {"retention.ms": "1"})


def test_ends_and_truncation(
    admin: TopicAdmin, appender: TransactionalAppender, cluster: AnyCluster, topic_prefix: str
) -> None:
    admin.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    appender.append([(topic_prefix, 1, batch_of([b"a", b"b", b"c"]))])
    places: list[str | tuple[str, int]] = [topic_prefix, (topic_prefix, 1)]
    assert admin.end(places) == {topic_prefix: 0, (topic_prefix, 1): 3}
    assert admin.end(places, Isolation.READ_COMMITTED) == {topic_prefix: 0, (topic_prefix, 1): 0}
    appender.commit()
    assert admin.delete_records({(topic_prefix, 1): 2}) == {(topic_prefix, 1): 2}
    # Deleting less than has been deleted changes nothing.
    assert admin.delete_records({(topic_prefix, 1): 1}) == {(topic_prefix, 1): 2}
    with pytest.raises(InvalidRequestError):
        admin.delete_records({(topic_prefix, 1): 1_000})
    with pytest.raises(NotFoundError):
        admin.end([f"{topic_prefix}-missing"])
    with pytest.raises(NotFoundError):
        admin.delete_records({f"{topic_prefix}-missing": 0})
    assert admin.end([]) == {}
    assert admin.delete_records({}) == {}
    assert read_values(cluster.bootstrap_servers, topic_prefix, partition=1, first=2) == [b"c"]


def test_nobody_there_is_unavailable() -> None:
    admin = KafkaClient("127.0.0.1:1", timeout_s=0.3).topics
    with pytest.raises(KafkaUnavailableError):
        admin.cluster_id()
    with pytest.raises(KafkaUnavailableError):
        admin.create_topics([TopicSpec(name="x")])
    with pytest.raises(KafkaUnavailableError):
        admin.seal(["x"], timeout_s=0.3)

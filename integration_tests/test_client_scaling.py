"""Streams that change while they are in use: scales, rolling commits, deletion, and what other clients hear of it."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.clients import Site, place_of, until
from rollbridge.base.sn import DLSN
from rollbridge.errors import InvalidNameError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.epochs import EpochCause
from rollbridge_coordinator.core.stream_state import segment_topic_spec


def test_a_transaction_that_outlives_scales_keeps_the_order_of_every_key(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    """Before, across and after two scales; each key's records come out in the order of the commits."""
    expected: dict[bytes, list[bytes]] = defaultdict(list)
    keys = [b"key-%d" % number for number in range(20)]

    def small(name: bytes) -> None:
        with client.transaction(orders) as transaction:
            for key in keys:
                transaction.write(orders, key=key, value=name)
                expected[key].append(name)

    old = client.begin(orders, label="old")
    for number in range(100):
        old.write(orders, key=keys[number % 20], value=b"old-%d" % number)
    small(b"before")
    first = client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
    assert (first.epoch, first.cause) == (1, EpochCause.SCALE)
    small(b"between")
    middle = client.begin(orders, label="middle")
    middle_futures = [middle.write(orders, key=key, value=b"middle") for key in keys]
    client.admin.scale(orders, seal=[1, 2], ranges=[(0.0, 0.1), (0.1, 0.25), (0.5, 1.0)])
    small(b"after")
    for number in range(100, 200):
        old.write(orders, key=keys[number % 20], value=b"old-%d" % number)
    result = old.commit()
    for key in keys:
        expected[key] += [b"old-%d" % number for number in range(200) if keys[number % 20] == key]
    small(b"later")
    middle.commit()
    for key in keys:
        expected[key].append(b"middle")
    small(b"last")

    history = client.admin.history(orders)
    assert [record.cause for record in history.records[-4:]] == [
        EpochCause.ROLLING_TRANSACTIONS,
        EpochCause.ROLLING_ACTIVE,
    ] * 2
    found: dict[bytes, list[tuple[DLSN, bytes]]] = defaultdict(list)
    for message in site.committed(orders):
        key, value = cast("tuple[bytes, bytes]", (message.key(), message.value()))
        found[key].append((place_of(message), value))
    # Segments of one key's lineage have rising epochs, so its records in order of their DLSNs are in order of time.
    assert {key: [value for _, value in sorted(records)] for key, records in found.items()} == dict(expected)
    assert result.records == 200
    places = {place for records in found.values() for place, _ in records}
    assert all(future.result() in places for future in middle_futures)


def test_a_client_hears_of_a_scale_by_another(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    with site.connect("other") as other:
        other.begin(orders).commit()
        client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])

        def epoch_of_a_new_one() -> int:
            with other.transaction(orders) as transaction:
                transaction.write(orders, key=b"k", value=b"v")
            return transaction.id.epoch

        until(lambda: epoch_of_a_new_one() == 1)


def test_a_topic_of_somebody_else_is_not_taken_for_a_segment(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    stream = f"{scope}/taken"
    client.admin.create_stream(stream)
    # The name that the segment of the stream's next life will have.
    spec = segment_topic_spec(client.admin.describe(stream).config, rollbridge.SegmentId.of(0, 1))
    client.admin.delete_stream(stream)
    admin = KafkaClient(site.cluster.bootstrap_servers).topics
    admin.create_topics([TopicSpec(name=spec.name, config=spec.config)])
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers})
    producer.produce(spec.name, b"somebody else's", partition=0)
    assert producer.flush(120) == 0
    with pytest.raises(InvalidNameError, match=f"{spec.name} exists already .* was not created; delete the topic"):
        client.admin.create_stream(stream)
    admin.delete_topics([spec.name])
    client.admin.create_stream(stream)

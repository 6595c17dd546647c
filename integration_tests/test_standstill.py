"""Consumers of which the library forgets a partition, here because the test has it paused: another one takes over."""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from integration_tests.patience import eventually
from rollbridge.kafka import standstill
from rollbridge.model.names import StreamName

LOOK_S = 0.2


@pytest.fixture(autouse=True)
def looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "LOOK_S", LOOK_S)


def test_a_reader_goes_on_although_a_segment_was_forgotten(client: rollbridge.Bridge, orders: str) -> None:
    topic = StreamName.parse(orders).segment_topic(rollbridge.SegmentId.of(0, 0))
    keys = [b"%d" % number for number in range(8)]
    found: list[bytes | None] = []

    def has_read(count: int) -> bool:
        found.extend(record.value for record in reader.consume(100, 0.05))
        return len(found) >= count

    with client.writer(orders) as writer, client.reader(orders) as reader:
        for number in range(1, 4):
            writer.write_all((key, b"%d" % number) for key in keys)
            writer.flush(120)
            eventually(lambda number=number: has_read(number * len(keys)), "all segments were read")  # type: ignore[misc]
            reader._consumer.pause([TopicPartition(topic, 0)])
    assert found == sorted(found, key=lambda value: value or b"")

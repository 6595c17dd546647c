"""Deliveries that librdkafka reports without an offset: nobody knows what became of the frame, so it is sent again."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Message

import rollbridge
from integration_tests.clients import Site
from rollbridge.client.sender import Delivered, Sender
from rollbridge.client.transaction import CommitFuture

TRANSACTIONS = 40


@pytest.mark.parametrize("written", [True, False], ids=["it was written", "it was lost"])
def test_a_frame_that_is_acknowledged_without_an_offset_is_sent_again(
    site: Site, orders: str, payments: str, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    report, send = Sender._report, Sender.send
    doubted: set[tuple[str, bytes, bytes]] = set()

    def without_offset(message: Message) -> Message | None:
        """What the library says of a frame's first delivery; None of those that follow."""
        key, value, topic = message.key() or b"", message.value() or b"", message.topic() or ""
        if (topic, key, value) in doubted:
            return None
        doubted.add((topic, key, value))
        return Message(topic=topic, partition=message.partition() or 0, offset=-1001, key=key, value=value)

    def report_without(sender: Sender, delivered: Delivered, fault: KafkaError | None, message: Message) -> None:
        report(sender, delivered, fault, (without_offset(message) if written else None) or message)

    def lose(sender: Sender, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        lost = without_offset(Message(topic=topic, partition=partition, offset=7, key=key, value=value))
        if written or lost is None:
            send(sender, topic, partition, key, value, delivered)
        else:
            report(sender, delivered, None, lost)

    monkeypatch.setattr(Sender, "_report", report_without)
    monkeypatch.setattr(Sender, "send", lose)
    with site.connect() as client:
        futures = [write(client, number, orders, payments) for number in range(TRANSACTIONS)]
        positions = [future.result(60).position for future in futures]
    assert positions == sorted(positions)
    expected = sorted(b"%d" % number for number in range(TRANSACTIONS))
    assert sorted(message.value() or b"" for message in site.committed(orders)) == expected
    assert sorted(message.value() or b"" for message in site.committed(payments)) == sorted(
        b"%d" % number for number in range(0, TRANSACTIONS, 3)
    )
    assert len(doubted) > TRANSACTIONS


def write(client: rollbridge.Bridge, number: int, orders: str, payments: str) -> CommitFuture:
    """A transaction over one stream, or, each third, over both."""
    streams = (orders,) if number % 3 else (payments, orders)
    transaction = client.begin(*streams)
    for stream in streams:
        transaction.write(stream, key=b"k%d" % number, value=b"%d" % number)
    return transaction.commit_async()

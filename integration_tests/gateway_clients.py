"""Clients of a gateway on librdkafka."""

from __future__ import annotations

from collections import Counter

from confluent_kafka import Message, Producer

from integration_tests.gateways import GatewayProcess


def producer_of(gateway: GatewayProcess, transactional_id: str, **settings: object) -> Producer:
    """A transactional producer whose only difference is its bootstrap address."""
    return Producer(
        {
            "bootstrap.servers": gateway.address,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 3600_000,
            "socket.timeout.ms": 60_000,
            "linger.ms": 5,
            **settings,
        }
    )


def topic_of(stream: str) -> str:
    """What a stream with key ranges is called by producers."""
    return stream.replace("/", ".")


def keys_in_order(messages: list[Message]) -> bool:
    """Whether the numbers of each key rise."""
    last: dict[bytes, int] = {}
    for message in messages:
        key, number = message.key() or b"", int((message.value() or b"0").split(b"-")[-1])
        if last.get(key, -1) >= number:
            return False
        last[key] = number
    return True


def values(messages: list[Message]) -> Counter[bytes]:
    """How often each value is there."""
    return Counter(message.value() or b"" for message in messages)

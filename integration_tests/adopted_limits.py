"""Adopted topics with limits of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
)

import rollbridge
from integration_tests.clients import Site, adopt, read_committed, stream_of

PARTITIONS = 2


Make = Callable[..., str]


@pytest.fixture
def kafka(site: Site) -> AdminClient:
    return AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})


@pytest.fixture
def adopted(kafka: AdminClient, client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> Make:
    """Makes a topic with settings, and adopts it."""

    def make(**settings: object) -> str:
        name = unique_name("limits")
        config = {key.replace("_", "."): str(value) for key, value in settings.items()}
        for created in kafka.create_topics([NewTopic(name, PARTITIONS, 1, config=config)]).values():
            created.result()
        adopt(client, name)
        return name

    return make


def messages(site: Site, topic: str, isolation: str = "read_committed") -> list[Message]:
    return read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS, isolation=isolation)


def values(site: Site, topic: str) -> list[bytes]:
    return sorted(message.value() or b"" for message in messages(site, topic))


def committed(client: rollbridge.Bridge, topic: str) -> list[list[rollbridge.Record]]:
    """The records of each committed transaction that wrote to a topic."""
    with client.transactions(stream_of(client, topic).partition("/")[0], follow=False) as found:
        return [list(item.records()) for item in found if item.counts().get(stream_of(client, topic))]

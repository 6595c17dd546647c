"""Names of Kafka's topics, and which stream each means: one rule, for coordinators, gateways and the doctor.

A name means the first of these that there is:

1. the topic of that name that a stream has adopted: that stream;
2. any other topic of the brokers: no stream;
3. a stream without a topic: its virtual topic ``scope.stream``, by which producers at gateways know it.

So the brokers' topic wins, and a stream whose name means something else is *in a clash*: producers at gateways do not
reach it until the topic is gone. Whoever makes a stream is refused one that would be, or would bring another one into
it; a topic that is made later is reported.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from rollbridge.model.records import StreamConfig


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Streams by the names of topics.

    Attributes:
        streams: Stream that a name means; a name that is missing means none.
        clashes: Stream whose virtual topic a name would be, if the brokers had no topic of that name.
    """

    streams: Mapping[str, StreamConfig]
    clashes: Mapping[str, StreamConfig]

    @classmethod
    def of(cls, streams: Iterable[StreamConfig], at_brokers: Container[str]) -> TopicNames:
        """Return what names mean.

        Args:
            streams: All streams that there are.
            at_brokers: Names of the brokers' topics; others than names of virtual topics need not be among them.
        """
        known = list(streams)
        found = {config.topic: config for config in known if config.topic}
        clashes: dict[str, StreamConfig] = {}
        for config in known:
            name = config.name.virtual_topic
            if not config.topic:
                (clashes if name in found or name in at_brokers else found)[name] = config
        return cls(found, clashes)

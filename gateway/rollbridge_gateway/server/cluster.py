"""The cluster as clients see it: brokers under their own ids, each at a port of a gateway, and virtual topics.

A client keeps the ids of brokers, and all of their addresses are those of one gateway: that to which rendezvous hashing
of its ``client.id`` gives it. So a producer's coordinator and all leaders it writes to are one process, and when that
one dies, the others agree on the next, without asking each other. Gateways are listed as well, as brokers that lead
nothing, under ids of their own: clients that ask only brokers they know of find the way by them, and a transaction's
coordinator has the id of the gateway that serves it. librdkafka, told that its coordinator is the broker that it was,
continues with the address that it had; told of another one, it does not.

::

    client --- port of broker 1 ---+
           --- port of broker 2 ---+  gateway a  --- broker 1, broker 2, broker 3
           --- port of broker 3 ---+
           --- first port ---------+  (bootstrap, relayed to any broker; coordinator of transactions)
           --- first port of gateway b
           first ports are known as brokers 1,000,000,000 and above

A stream with key ranges is a topic ``scope.stream`` with a fixed number of virtual partitions, all led by one broker. A
partition there is no place: the key decides. Topics that streams have adopted, and all others, are the brokers' own.

Source: WarpStream's and Bufstream's Metadata (one agent leads everything); kafka-proxy (ports per broker).
"""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i32

from rollbridge.metadata.gateways import GATEWAYS_FROM
from rollbridge.stream.names import is_hidden

_GATEWAY_IDS: Final = 1_000_000_000
_DIGITS: Final = 10
"""Of a gateway's id."""
_TOPIC_IDS: Final = uuid.UUID("6f1f1d2e-3a1b-5c7d-9e2f-70b1c8d4a6e5")


@dataclass(frozen=True, slots=True, order=True)
class Gateway:
    """A live gateway, as its ephemeral node says.

    Attributes:
        name: Its unique name.
        host: Where clients reach it.
        port: Its first port.
        ports: Port of each broker, by the broker's id.
    """

    name: str
    host: str
    port: int
    ports: tuple[tuple[int, int], ...] = ()

    @property
    def node_id(self) -> int:
        """Id under which it is listed as a broker; the same wherever and whenever it is worked out.

        At another address it is another one, see above.
        """
        digest = hashlib.blake2b(f"{self.name}@{self.host}:{self.port}".encode(), digest_size=8).digest()
        return GATEWAYS_FROM + int.from_bytes(digest, "big") % _GATEWAY_IDS

    def port_of(self, broker: int) -> int:
        """Return the port of a broker; the first one if it has none yet, which reaches any broker."""
        return dict(self.ports).get(broker, self.port)


def chosen(key: str, gateways: Iterable[Gateway]) -> Gateway:
    """Return the gateway that a client belongs to; when one goes, only its own clients move.

    Raises:
        ValueError: there is none.

    Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
    """
    return max(gateways, key=lambda item: (_weight(key, item.name), item.name))


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def chosen_broker(key: str, brokers: Iterable[int]) -> int:
    """Return the broker that tells of the transactions of a transactional id, or leads a virtual topic.

    Raises:
        ValueError: there is none.
    """
    return max(brokers, key=lambda broker: (_weight(key, str(broker)), broker))


@dataclass(frozen=True, slots=True)
class View:
    """Cluster as a client is told of it.

    Attributes:
        gateways: Live gateways, this one included.
        virtual: Virtual topics: their names, and the number of their partitions.
        logs: Commit logs. They, buffers and snapshots are told to be internal, so that patterns leave them out.
    """

    gateways: Sequence[Gateway]
    virtual: Mapping[str, int]
    logs: Container[str] = ()

    def address(self, client_id: str | None, broker: int) -> tuple[str, int]:
        """Return where a client finds a broker: host and port."""
        mine = chosen(client_id or "", self.gateways)
        return mine.host, mine.port_of(broker)

    def metadata(
        self,
        answer: Any,
        client_id: str | None,
        asked: Iterable[Any] | None,
        denied: Mapping[str, ErrorCode] = MappingProxyType({}),
        *,
        hides_brokers: bool = False,
    ) -> Any:
        """Return a broker's answer to Metadata, with addresses of gateways and with virtual topics.

        Args:
            asked: Topics that were asked for; None for all.
            denied: Virtual topics that the client is not told of, and why.
            hides_brokers: Tell that there are no brokers, and no leaders; see :class:`Departures`.
        """
        brokers = [self._moved(item, client_id) for item in answer.brokers]
        ids = [int(item.node_id) for item in answer.brokers]
        gateways = [
            replace(brokers[0], node_id=BrokerId(item.node_id), host=item.host, port=i32(item.port))
            for item in sorted(self.gateways)
            if brokers
        ]
        topics = self._topics(answer, ids, asked, denied)
        if hides_brokers:
            return replace(answer, brokers=tuple(gateways), topics=tuple(map(_without_leaders, topics)))
        return replace(answer, brokers=(*brokers, *gateways), topics=tuple(topics))

    def describe_topics(
        self,
        answer: Any,
        brokers: Collection[int],
        asked: Collection[str],
        denied: Mapping[str, ErrorCode] = MappingProxyType({}),
    ) -> Any:
        """Return a broker's answer to DescribeTopicPartitions with virtual topics behind its own.

        ``asked`` are the virtual topics described in it; ``denied`` are those that the client is not told of, and why.
        """
        known = map(self._marked, answer.topics)
        return replace(answer, topics=(*known, *self._wanted(type(answer), asked, brokers, denied)))

    def _topics(
        self, answer: Any, brokers: Sequence[int], asked: Iterable[Any] | None, denied: Mapping[str, ErrorCode]
    ) -> list[Any]:
        known = [self._marked(item) for item in answer.topics if item.name not in self.virtual]
        if not brokers:
            return known
        if asked is None:
            wanted = sorted(set(self.virtual).difference(denied))
        else:
            wanted = [str(item.name) for item in asked if item.name is not None and str(item.name) in self.virtual]
        return [*known, *self._wanted(type(answer), wanted, brokers, denied)]

    def _marked(self, topic: Any) -> Any:
        """Return a topic as internal if it is one of rollbridge's; Metadata 0 does not say it."""
        if hasattr(topic, "is_internal") and topic.name is not None and self._is_internal(str(topic.name)):
            return replace(topic, is_internal=True)
        return topic

    def _is_internal(self, name: str) -> bool:
        return name in self.logs or is_hidden(name)

    def _wanted(
        self, answer: type[Any], wanted: Iterable[str], brokers: Collection[int], denied: Mapping[str, ErrorCode]
    ) -> Iterator[Any]:
        kind = _nested(answer, "topics")
        for name in wanted:
            yield _denied(kind, name, denied[name]) if name in denied else self._virtual(kind, name, brokers)

    def _virtual(self, kind: type[Any], name: str, brokers: Iterable[int]) -> Any:
        leader = BrokerId(chosen_broker(name, brokers))
        part = _nested(kind, "partitions")
        partitions = tuple(
            _made(
                part,
                error_code=ErrorCode.none,
                partition_index=i32(index),
                leader_id=leader,
                leader_epoch=i32(0),
                replica_nodes=(leader,),
                isr_nodes=(leader,),
                eligible_leader_replicas=(),
                last_known_elr=(),
                offline_replicas=(),
            )
            for index in range(self.virtual[name])
        )
        return _made(
            kind,
            error_code=ErrorCode.none,
            name=TopicName(name),
            topic_id=topic_id(name),
            is_internal=False,
            partitions=partitions,
        )

    def coordinator(self, client_id: str | None) -> tuple[int, str, int]:
        """Return the coordinator of a client's transactions: id, host and port."""
        mine = chosen(client_id or "", self.gateways)
        return mine.node_id, mine.host, mine.port

    def describe_cluster(self, answer: Any, client_id: str | None) -> Any:
        """Return a broker's answer to DescribeCluster with addresses of gateways."""
        return replace(answer, brokers=tuple(self._moved(item, client_id) for item in answer.brokers))

    def find_coordinator(self, answer: Any, client_id: str | None) -> Any:
        """Return a broker's answer to FindCoordinator with addresses of gateways."""
        if hasattr(answer, "coordinators"):
            moved = tuple(self._moved(item, client_id) for item in answer.coordinators)
            return replace(answer, coordinators=moved)
        return self._moved(answer, client_id)

    def _moved(self, item: Any, client_id: str | None) -> Any:
        """Return an entity with the address of the broker that it names; without one it stays as it is."""
        broker = int(item.broker_id if hasattr(item, "broker_id") else item.node_id)
        if broker < 0:
            return item
        host, port = self.address(client_id, broker)
        return replace(item, host=host, port=i32(port))


def is_gateway(broker: str) -> bool:
    """Return whether the id of a broker, as names of resources have it, is that of a gateway."""
    return broker.isdecimal() and len(broker) == _DIGITS and int(broker) >= GATEWAYS_FROM


def topic_id(name: str) -> uuid.UUID:
    """Return the id of a virtual topic, which is the same at every gateway."""
    return uuid.uuid5(_TOPIC_IDS, name)


def _denied(kind: type[Any], name: str, code: ErrorCode) -> Any:
    return _made(
        kind, error_code=code, name=TopicName(name), topic_id=uuid.UUID(int=0), is_internal=False, partitions=()
    )


def _without_leaders(topic: Any) -> Any:
    partitions = (
        replace(part, error_code=ErrorCode.leader_not_available, leader_id=BrokerId(-1)) for part in topic.partitions
    )
    return replace(topic, partitions=tuple(partitions))


def _nested(kind: type[Any], name: str) -> type[Any]:
    """Return the class of the entities in a field of several."""
    hint = kind.__annotations__[name]
    found: type[Any] = hint.__args__[0]
    return found


def _made(kind: type[Any], **values: Any) -> Any:
    fields = kind.__dataclass_fields__
    return kind(**{name: value for name, value in values.items() if name in fields})


# Gateways that are gone, and how clients come to forget their addresses.
#
# A client knows brokers by their ids, which are the same at each gateway. librdkafka keeps with an id what belongs to
# the address that it had. Of a broker whose address has changed it waits out the pause before the next attempt to
# connect, which has grown to ten seconds while the dead gateway refused it. And a group's coordinator is reached at the
# address that its broker had, for ever, as long as it is told that it is this broker. So it is told once what a cluster
# says of itself that is electing leaders: that there are none, or that there is no coordinator. It forgets what it knew
# of them and asks again, a moment later. Other clients do that anyway.
#
# * Metadata without brokers is for those whose gateway is gone, on connections from before, if they ask about topics by
#   name: producers and consumers do, and ask again for a leader. Who asks for brokers alone, as admins do before they
#   ask
#   all of them, would take the answer for the truth.
# * That there is no coordinator is for those that ask for a group's on a connection from before, whatever gateway they
#   belong to: a client may have had its coordinator at the gateway that is gone, and be connected to another one as
#   well.
#   Those whose only connections were to the one that is gone have come back within half a minute, and count likewise.
#
# Coordinators of transactions have the ids of gateways, and need none of this; see the top of this module.
#
# Source: librdkafka's ``rd_kafka_broker_update``, ``rd_kafka_cgrp_coord_update`` and
# ``rd_kafka_metadata_decommission_unavailable_brokers``.


KNOWN_S: Final = 300.0
"""Seconds for which a departure is known; clients have long noticed by then, and asked for their coordinators."""
MISSED_S: Final = 30.0
"""Seconds in which who needs a leader, or another gateway, asks for it: brokers are hidden for so long."""


class Departure(NamedTuple):
    """A change of gateways after which some are gone.

    Attributes:
        number: It is higher than those of earlier ones.
        at_s: When it was noticed.
        former: The gateways before.
        gone: Addresses of them at which there is none any more.
    """

    number: int
    at_s: float
    former: tuple[Gateway, ...]
    gone: frozenset[tuple[str, int]]

    def has_left(self, client_id: str | None) -> bool:
        """Return whether the gateway that a client belonged to is gone."""
        return bool(self.gone) and _place(chosen(client_id or "", self.former)) in self.gone


class Departures:
    """The departures of the last minutes, as one gateway has noticed them."""

    def __init__(self) -> None:
        self._known: deque[Departure] = deque()
        self._count = 0

    def changed(self, former: Sequence[Gateway], present: Sequence[Gateway], now_s: float) -> None:
        """Note which gateways are live now, and which were before; at the start there were none."""
        live = frozenset(map(_place, present))
        self._known = deque(item._replace(gone=item.gone - live) for item in self.recent(now_s))
        gone = frozenset(map(_place, former)) - live
        if gone:
            self._count += 1
            self._known.append(Departure(self._count, now_s, tuple(former), gone))

    def recent(self, now_s: float) -> Sequence[Departure]:
        """Return those that are known, oldest first."""
        while self._known and self._known[0].at_s < now_s - KNOWN_S:
            self._known.popleft()
        return self._known


class ToldDepartures:
    """Departures that one connection has told its client of."""

    def __init__(self, began_s: float) -> None:
        """Begin with none.

        Args:
            began_s: When the client has connected.
        """
        self._began_s = began_s
        self._brokers = self._coordinator = 0

    def hides_brokers(self, recent: Sequence[Departure], client_id: str | None, now_s: float) -> bool:
        """Return whether to tell that there are no brokers; asked once for each answer."""
        since_s = max(self._began_s, now_s - MISSED_S)
        fresh = [item for item in recent if item.number > self._brokers and item.at_s > since_s]
        if recent:
            self._brokers = recent[-1].number
        return any(item.has_left(client_id) for item in fresh)

    def hides_coordinator(self, recent: Sequence[Departure]) -> bool:
        """Return whether to tell that there is no coordinator of a group; asked once for each answer."""
        told = self._coordinator
        if recent:
            self._coordinator = recent[-1].number
        return any(item.number > told and item.gone and self._began_s < item.at_s + MISSED_S for item in recent)


def _place(gateway: Gateway) -> tuple[str, int]:
    """Return what clients know of it: one that was started again has another name by default, and they are there."""
    return gateway.host, gateway.port

"""APIs that a gateway serves itself or relays, and their versions: one table, which ApiVersions answers from.

An API is in one of three rooms:

* ``OWN``: answered here. Transactions are ours; brokers never hear of them.
* ``REWRITTEN``: asked of a broker, whose answer has addresses of brokers in it, or says nothing of streams. Addresses
  become the gateway's, which also lists itself: what clients collect from all brokers they know of is not told twice.
* ``RELAYED``: bytes to a broker and back. Nothing is decoded, so any content passes.

Other APIs are not advertised, and a client that sends one all the same is disconnected, as by a broker. A version is
advertised if the broker has it and it is in this table: it is tested, or was read for addresses in its answer. Fetch
stops at version 15, since later answers may name brokers' addresses (KIP-951), which would lead consumers past the
gateway.

Some versions must be advertised though no client should use them: librdkafka writes record batches only if Fetch 4 or
newer is offered, and clients before 3.9 take a broker without Produce 0 for a foreign one (KAFKA-18659).

Source: Kafka 4.2's message definitions (``*Request.json``); librdkafka's ``rdkafka_feature.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode


class Handling(IntEnum):
    """Server of an API."""

    OWN = 0
    REWRITTEN = 1
    RELAYED = 2


class Api(IntEnum):
    """API keys that are named in this package."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    INCREMENTAL_ALTER_CONFIGS = 44
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    DESCRIBE_TOPIC_PARTITIONS = 75


class Served(NamedTuple):
    """How an API is served.

    Attributes:
        room: Its server.
        low, high: Versions.
        why: What the highest version needs, or why it is not higher.
    """

    room: Handling
    low: int
    high: int
    why: str


class VersionRange(NamedTuple):
    """Versions of an API, from ``low`` to ``high``."""

    low: int
    high: int


def _relayed(high: int, why: str = "bytes") -> Served:
    return Served(Handling.RELAYED, 0, high, why)


def _about_streams(low: int, high: int) -> Served:
    return Served(Handling.REWRITTEN, low, high, "names topics, and streams have names of topics")


TABLE: Final[Mapping[int, Served]] = {
    Api.PRODUCE: Served(Handling.OWN, 0, 12, "v12 is transactions v2; v13 names topics by id"),
    Api.METADATA: Served(Handling.REWRITTEN, 0, 13, "v13 has an error for all of it, of which no broker makes use"),
    Api.FIND_COORDINATOR: Served(Handling.REWRITTEN, 0, 6, "several keys since v4; share groups since v6"),
    Api.LIST_GROUPS: Served(Handling.REWRITTEN, 0, 5, "none at the first port: who asks all nodes hears of each once"),
    Api.API_VERSIONS: Served(Handling.OWN, 0, 4, "finalized features tell clients of transactions v2"),
    Api.INIT_PRODUCER_ID: Served(Handling.OWN, 0, 6, "v3 renews a pair (KIP-360); v6 keeps what is prepared (KIP-939)"),
    Api.ADD_PARTITIONS_TO_TXN: Served(Handling.OWN, 0, 3, "v4 and v5 are for brokers among themselves"),
    Api.ADD_OFFSETS_TO_TXN: Served(Handling.OWN, 0, 4, "v4 knows TRANSACTION_ABORTABLE"),
    Api.END_TXN: Served(Handling.OWN, 0, 5, "v5 answers with the next pair (KIP-890)"),
    Api.TXN_OFFSET_COMMIT: Served(Handling.OWN, 0, 5, "v5 needs no AddOffsetsToTxn before it"),
    Api.DESCRIBE_CLUSTER: Served(Handling.REWRITTEN, 0, 2, "v2 tells fenced brokers"),
    Api.DESCRIBE_PRODUCERS: Served(Handling.OWN, 0, 0, "open transactions of ours, and those of the broker"),
    Api.DESCRIBE_TRANSACTIONS: Served(Handling.OWN, 0, 0, "of transactional ids of ours"),
    Api.LIST_TRANSACTIONS: Served(Handling.OWN, 0, 1, "v2 has a pattern of ids"),
    Api.DESCRIBE_TOPIC_PARTITIONS: _about_streams(0, 0),
    Api.LIST_OFFSETS: _about_streams(1, 11),
    Api.OFFSET_FOR_LEADER_EPOCH: _about_streams(2, 4),
    Api.DESCRIBE_CONFIGS: _about_streams(1, 4),
    Api.ALTER_CONFIGS: _about_streams(0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: _about_streams(0, 1),
    Api.CREATE_TOPICS: _about_streams(2, 7),
    Api.DELETE_TOPICS: _about_streams(1, 6),
    Api.CREATE_PARTITIONS: _about_streams(0, 3),
    Api.DESCRIBE_LOG_DIRS: Served(Handling.REWRITTEN, 1, 4, "none at the first port, likewise"),
    Api.SASL_HANDSHAKE: Served(
        Handling.RELAYED, 1, 1, "the broker decides; v0 is followed by bytes that are no requests"
    ),
    Api.SASL_AUTHENTICATE: _relayed(2, "the broker decides"),
    Api.FETCH: _relayed(15, "v16 may name addresses (KIP-951)"),
    8: _relayed(9, "v10 names topics by id"),  # OffsetCommit
    9: _relayed(9, "v10 names topics by id"),  # OffsetFetch
    11: _relayed(9),  # JoinGroup
    12: _relayed(4),  # Heartbeat
    13: _relayed(5),  # LeaveGroup
    14: _relayed(5),  # SyncGroup
    15: _relayed(6),  # DescribeGroups
    21: _relayed(2),  # DeleteRecords
    29: _relayed(3),  # DescribeAcls
    30: _relayed(3),  # CreateAcls
    31: _relayed(3),  # DeleteAcls
    34: _relayed(2),  # AlterReplicaLogDirs
    38: _relayed(3),  # CreateDelegationToken
    39: _relayed(2),  # RenewDelegationToken
    40: _relayed(2),  # ExpireDelegationToken
    41: _relayed(3),  # DescribeDelegationToken
    42: _relayed(2),  # DeleteGroups
    43: _relayed(2),  # ElectLeaders
    45: _relayed(1),  # AlterPartitionReassignments
    46: _relayed(0),  # ListPartitionReassignments
    47: _relayed(0),  # OffsetDelete
    48: _relayed(1),  # DescribeClientQuotas
    49: _relayed(1),  # AlterClientQuotas
    50: _relayed(0),  # DescribeUserScramCredentials
    51: _relayed(0),  # AlterUserScramCredentials
    55: _relayed(1, "v2 names addresses of controllers"),  # DescribeQuorum
    57: _relayed(2),  # UpdateFeatures
    64: _relayed(0),  # UnregisterBroker
    68: _relayed(1),  # ConsumerGroupHeartbeat
    69: _relayed(1),  # ConsumerGroupDescribe
    74: _relayed(1),  # ListConfigResources
}

TRANSACTION_VERSION: Final = "transaction.version"
"""Feature that tells clients of transactions v2."""
TRANSACTION_VERSION_MAX: Final = 2


def offered(broker: Mapping[int, VersionRange]) -> dict[int, VersionRange]:
    """Return what to advertise in front of a broker: our own APIs, and of the others what the broker has as well.

    Of Produce and InitProducerId, too, which are relayed for producers without transactions.
    """
    found: dict[int, VersionRange] = {}
    for key, served in TABLE.items():
        if served.room is Handling.OWN and key not in (Api.PRODUCE, Api.INIT_PRODUCER_ID):
            found[key] = VersionRange(served.low, served.high)
            continue
        theirs = broker.get(key)
        if theirs is None:
            continue
        both = VersionRange(max(served.low, theirs.low), min(served.high, theirs.high))
        if both.low <= both.high:
            found[key] = both
    return found


def room_of(key: int, version: int) -> Handling | None:
    """Return the server of a request; None if there is none."""
    served = TABLE.get(key)
    if served is None or not served.low <= version <= served.high:
        return None
    return served.room


# Requests that name topics: the parts about streams, which no broker knows, and the answers about those.
#
# A stream with key ranges is listed as a topic, so a request for all topics includes it. To readers it is an empty
# topic: its records lie in the topics of its segments, under other names. It is not created, changed or deleted as a
# topic; a client that tries is told what to do. All else in a request goes to the broker, whose answer gets ours behind
# it.


TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
"""Codes of Kafka's ``ConfigResource.Type``."""
_EMPTY_AT: Final = frozenset((-1, -2, -4))
"""Timestamps of ListOffsets that mean an end or a beginning, which an empty partition has as well."""

AnswerOfTopic = Callable[[str, Any, int, ErrorCode], Mapping[str, Any]]
"""Makes an entry of the answer: of a stream's topic, what was asked of it, its partitions, and why it is refused."""


class Naming(NamedTuple):
    """Where a request and its answer have topics.

    Attributes:
        asked: Fields of requests with entries that name topics; the first one that a version has.
        name: Field of an entry with the name; entries without it are names themselves.
        answered: Field of the answer with entries about topics.
        answer: Makes an entry about a stream.
    """

    asked: tuple[str, ...]
    name: str
    answered: str
    answer: AnswerOfTopic

    def field(self, body: Any) -> str:
        """Return the field of a request with its entries."""
        return next(field for field in self.asked if hasattr(body, field))

    def split(self, body: Any, virtual: Container[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the entries for the broker, and those about streams by the names of their topics."""
        others: list[Any] = []
        ours: dict[str, Any] = {}
        for entry in getattr(body, self.field(body)) or ():
            name = getattr(entry, self.name, entry)
            if name in virtual and getattr(entry, "resource_type", TOPIC_RESOURCE) == TOPIC_RESOURCE:
                ours[str(name)] = entry
            else:
                others.append(entry)
        return tuple(others), ours


def _offsets(name: str, entry: Any, count: int, code: ErrorCode) -> Mapping[str, Any]:
    def of(part: Any) -> Mapping[str, Any]:
        found = {"partition_index": part.partition_index, "error_code": _code(part.partition_index, count, code)}
        if found["error_code"] is ErrorCode.none and int(part.timestamp) in _EMPTY_AT:
            return {**found, "timestamp": -1, "offset": 0, "leader_epoch": 0}
        return {**found, "timestamp": -1, "offset": -1, "leader_epoch": -1}

    return {"name": name, "partitions": [of(part) for part in entry.partitions]}


def _epochs(name: str, entry: Any, count: int, code: ErrorCode) -> Mapping[str, Any]:
    return {
        "topic": name,
        "partitions": [
            {
                "partition": part.partition,
                "error_code": _code(part.partition, count, code),
                "leader_epoch": 0,
                "end_offset": 0,
            }
            for part in entry.partitions
        ],
    }


def _code(partition: int, count: int, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.none and not 0 <= partition < count:
        return ErrorCode.unknown_topic_or_partition
    return code


def _refusal(otherwise: ErrorCode, advice: str) -> AnswerOfTopic:
    def refused(name: str, _entry: Any, _count: int, code: ErrorCode) -> Mapping[str, Any]:
        is_known = code is ErrorCode.none
        return {
            "name": name,
            "resource_type": TOPIC_RESOURCE,
            "resource_name": name,
            "error_code": otherwise if is_known else code,
            "error_message": f"{name} is a stream of rollbridge; nothing was changed: {advice}" if is_known else None,
        }

    return refused


_SETTINGS: Final = _refusal(ErrorCode.invalid_request, "use `rollbridge stream update`")

NAMINGS: Final[Mapping[int, Naming]] = {
    Api.LIST_OFFSETS: Naming(("topics",), "name", "topics", _offsets),
    Api.OFFSET_FOR_LEADER_EPOCH: Naming(("topics",), "topic", "topics", _epochs),
    Api.CREATE_TOPICS: Naming(
        ("topics",), "name", "topics", _refusal(ErrorCode.topic_already_exists, "choose another name")
    ),
    Api.DELETE_TOPICS: Naming(
        ("topics", "topic_names"),
        "name",
        "responses",
        _refusal(ErrorCode.invalid_request, "use `rollbridge stream delete`"),
    ),
    Api.CREATE_PARTITIONS: Naming(
        ("topics",), "name", "results", _refusal(ErrorCode.invalid_request, "use `rollbridge stream scale`")
    ),
    Api.ALTER_CONFIGS: Naming(("resources",), "resource_name", "responses", _SETTINGS),
    Api.INCREMENTAL_ALTER_CONFIGS: Naming(("resources",), "resource_name", "responses", _SETTINGS),
    Api.DESCRIBE_CONFIGS: Naming(("resources",), "resource_name", "results", _SETTINGS),
}
"""How requests name topics; DescribeConfigs is answered by the settings of the stream's buffer."""

"""What a gateway serves itself, what it relays, and in which versions: one table, which ApiVersions answers from.

An API is in one of three rooms:

* ``OWN``: answered here. Transactions are ours; brokers never hear of them.
* ``REWRITTEN``: asked of a broker, whose answer has addresses of brokers in it, or says nothing of streams. Addresses
  become the gateway's, which also lists itself: what clients collect from all brokers they know of is not told twice.
* ``RELAYED``: bytes to a broker and back. Nothing is decoded, so any content passes.

What is in none of them is not advertised, and a client that sends it all the same is disconnected, as by a broker. A
version is advertised if the broker has it and it stands here, which means that it is tested, or that it was read for
addresses in its answer. Fetch stops at version 15, since later answers may name brokers' addresses (KIP-951), which
would lead consumers past the gateway.

Some versions must be advertised though nobody should use them: librdkafka writes record batches only if Fetch 4 or
newer is offered, and clients before 3.9 take a broker without Produce 0 for a foreign one (KAFKA-18659).

Source: Kafka 4.2's message definitions (``*Request.json``); librdkafka's ``rdkafka_feature.c``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple


class Handling(IntEnum):
    """Who answers an API."""

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
        room: Who answers.
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
    Api.DESCRIBE_PRODUCERS: Served(Handling.OWN, 0, 0, "open transactions of ours, beside those of the broker"),
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
UNTAGGED_ANSWERS: Final = frozenset((Api.API_VERSIONS,))
"""APIs whose answers have a header without tagged fields in every version."""


def offered(broker: Mapping[int, VersionRange]) -> dict[int, VersionRange]:
    """Return what to advertise in front of a broker: our own APIs, and of the others what the broker has as well.

    Of Produce and InitProducerId, too, which are relayed for producers without transactions.

    Args:
        broker: What the broker advertises.
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
    """Return who answers a request; None if nobody does."""
    served = TABLE.get(key)
    if served is None or not served.low <= version <= served.high:
        return None
    return served.room
